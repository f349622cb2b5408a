"""The public face: every name is there, and importing it costs next to nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import linalg_dsl
import linalg_dsl as ld
from linalg_dsl.errors import ArgumentError


def test_every_name_resolves() -> None:
    for name in [*linalg_dsl.__all__, "min", "max", "sum", "abs", "__version__"]:
        assert getattr(linalg_dsl, name) is not None
        assert name in dir(linalg_dsl) or name == "__version__"
    assert linalg_dsl.ops.catalogue_names()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        linalg_dsl.nothing_of_the_kind  # noqa: B018


def test_no_submodule_hides_a_function() -> None:
    import linalg_dsl.driver
    import linalg_dsl.language.builder

    assert callable(linalg_dsl.compile)
    assert callable(linalg_dsl.recurrence)
    assert linalg_dsl.compile is linalg_dsl.driver.compile


def test_import_loads_none_of_the_large_packages() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import linalg_dsl;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"sympy", "lark", "jinja2", "networkx", "triton", "typer", "rich"} & set(eval(run.stdout))


def test_the_python_front_compiles_to_the_same_op_as_the_text() -> None:
    @ld.recurrence
    def mine(S, q: ld.K, k: ld.K, v: ld.V, g: ld.LogGate, scale=1 / ld.sqrt(ld.K)):  # type: ignore
        S = ld.exp(g) * S + ld.outer(k, v)
        return S, scale * S.T @ q

    text = """
recurrence mine
input q, k : [K]
input v : [V]
input g : log gate
const scale = 1 / sqrt(K)
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = scale S_tᵀ q_t
"""
    first, second = ld.compile(mine), ld.compile(text)
    assert first.spec == second.spec
    assert first.operator("torch") is second.operator("torch")


def test_what_compile_does_not_take() -> None:
    with pytest.raises(ArgumentError, match="got list"):
        linalg_dsl.compile([])  # type: ignore[arg-type]
