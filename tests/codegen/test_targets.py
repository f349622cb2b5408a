"""Kernels compile for every target without a GPU, and fit its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from catalogue_sets import IN_DEPTH

from linalg_dsl.codegen.targets import TARGETS, find_target
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.planner.canonical import canonicalise, classify
from linalg_dsl.planner.micro_tokens import choose_substeps
from linalg_dsl.planner.split import split

pytest.importorskip("triton")
# one entry per class; `make compile-all` compiles all
ENTRIES = ("linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
# one for each of the other ways to a kernel: the value side, two gates, signs, a state with one column,
# coupled states, scans of matrices and of vectors, dense updates; square states and slots are made of these
OTHERS = ("gated_oja", "dfw", "mamba2_negative", "osdn", "mdn", "mamba1", "hgrn", "gru")
# their kernels are made of parts of these, and compiling takes half a minute for a target
FEWER = ("linear_attention", "gated_delta_rule", "kda", "hgrn")
ON_TARGET: dict[str, tuple[str, ...]] = dict.fromkeys(TARGETS, FEWER)
ON_TARGET |= {"sm_90": (*ENTRIES, *OTHERS), "gfx942": (*ENTRIES, "hgrn")}
# classes that no entry has
WRITTEN = {
    "pure_rank": """
input q, k, a : [K]
input v : [V]
S_t = k_t (a_tᵀ S_{t-1}) + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
    "micro_tokens": """
const n = 4
input q : [K]
input k : [n, K] unit
input v : [n, V]
input beta : [n] in (0, 2)
for j in 1..n:
    S_t = S_t - beta_{t,j} k_{t,j} (k_{t,j}ᵀ S_t - v_{t,j}ᵀ)
o_t = S_tᵀ q_t
""",
    "two_sided": """
input q, k : [K] unit
input v : [V] unit
input g : log gate
S_t = exp(g_t) (I - k_t k_tᵀ) S_{t-1} (I - v_t v_tᵀ) + k_t v_tᵀ
o_t = S_tᵀ q_t
""",
}


def class_of(name: str) -> str:
    (recurrence,) = canonicalise(parse(catalogue_text(name))).recurrences
    return classify(recurrence)


def test_every_class_of_the_entries_tested_in_depth_is_here() -> None:
    assert {class_of(name) for name in ENTRIES} == {class_of(name) for name in IN_DEPTH}
    assert len({class_of(name) for name in ENTRIES}) == len(ENTRIES)


def compiled(target: str, *names: str) -> list[dict[str, Any]]:
    """The rows of ``linalg-dsl compile``."""
    # in a process of its own: the interpreter, which other tests use, does not compile
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "linalg_dsl", "compile", *names, "--target", target, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    for row in rows:
        assert row["target"] == target
        assert row["registers"] > 0
        assert row["shared"] <= row["limit"] == TARGETS[target].shared
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target: str) -> None:
    rows = compiled(target, *ON_TARGET[target])
    assert {row["recurrence"] for row in rows} == set(ON_TARGET[target])
    directions = {row["kernel"].split("_")[-1] for row in rows if row["recurrence"] == "kda"}
    assert {"prep", "walk"} <= directions
    # one warp holds a vector state and all that its groups of tokens load
    assert all(row["spilled"] <= 20 for row in rows if row["recurrence"] == "hgrn")


@pytest.mark.slow
def test_sums_over_channels_beside_products_compile_for_sm_100() -> None:
    """Of four warps there Triton 3.7 does not: their products lie in tensor memory."""
    (row,) = [r for r in compiled("sm_100", "rwkv7") if r["kernel"].endswith("gradients")]
    assert row["warps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_classes_without_an_entry_compile(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.rec"
    path.write_text(f"recurrence {name}\n{WRITTEN[name]}", encoding="utf-8")
    assert compiled("sm_90", str(path))


def test_four_substeps_are_compiled_as_micro_tokens() -> None:
    (stage,) = split(parse(f"recurrence steps\n{WRITTEN['micro_tokens']}")).stages
    assert choose_substeps(stage).layouts


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ArgumentError, match="expected one of sm_80, sm_86, sm_90, sm_100, gfx942, got 'sm_70'"
    ):
        find_target("sm_70")
