"""Kernels compile for every target without a GPU, and fit its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from catalogue_sets import IN_DEPTH

from linalg_dsl.codegen.targets import TARGETS, find_target
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.planner.canonical import canonicalise, classify

pytest.importorskip("triton")
# one entry per class; `make compile-all` compiles all
ENTRIES = ("linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
# the others' kernels are made of parts of these, and compiling takes half a minute for a target
FEWER = ("linear_attention", "gated_delta_rule", "kda")
ON_TARGET = {target: ENTRIES if target in ("sm_90", "gfx942") else FEWER for target in TARGETS}


def class_of(name: str) -> str:
    (recurrence,) = canonicalise(parse(catalogue_text(name))).recurrences
    return classify(recurrence)


def test_every_class_of_the_entries_tested_in_depth_is_here() -> None:
    assert {class_of(name) for name in ENTRIES} == {class_of(name) for name in IN_DEPTH}
    assert len({class_of(name) for name in ENTRIES}) == len(ENTRIES)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target: str) -> None:
    # in a process of its own: the interpreter, which other tests use, does not compile
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "linalg_dsl",
        "compile",
        *ON_TARGET[target],
        "--target",
        target,
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["recurrence"] for row in rows} == set(ON_TARGET[target])
    for row in rows:
        assert row["target"] == target
        assert row["registers"] > 0
        assert row["shared"] <= row["limit"] == TARGETS[target].shared
    steps = [row for row in rows if row["kernel"].endswith("_step")]
    assert {row["recurrence"] for row in steps} == set(ON_TARGET[target])
    if target == "sm_90":
        assert not any(row["spilled"] for row in steps)
    directions = {row["kernel"].split("_")[-1] for row in rows if row["recurrence"] == "kda"}
    assert {"prep", "walk"} <= directions


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ArgumentError, match="expected one of sm_80, sm_86, sm_90, sm_100, gfx942, got 'sm_70'"
    ):
        find_target("sm_70")
