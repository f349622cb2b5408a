"""Rows of params, ``U_{1}`` in text and ``U[0]`` in Python: values, gradients, and what is said of slips."""

from __future__ import annotations

import pytest

import linalg_dsl as ld
from linalg_dsl.errors import ArgumentError, DslError

# mypy: ignore-errors

SPARSE = """recurrence rows
input q, k : [K]
input v    : [V]
param U    : [2, K]
param c    : [2] in (0, 1)
S_t = (I - c_{1} U[1] k_tᵀ) S_{t-1} + c_{2} U_{2} v_tᵀ
o_t = S_tᵀ (q_t + U_{1})
"""
LOOP = """recurrence rows
const n = 2
input q : [K]
input y : [n, V]
input g : log gate
param U : [n, K] unit
S_t = exp(g_t) S_{t-1}
for j in 1..n:
    S_t = S_t - U_{j} (U_{j}ᵀ S_t - y_{t,j}ᵀ)
o_t = S_tᵀ q_t
"""
STAGES = """recurrence rows
input q, k : [K]
input v    : [V]
param U    : [2, K]
n_t = 0.9 n_{t-1} + U_{1} ⊙ k_t
S_t = 0.9 S_{t-1} + (k_t + U_{2}) v_tᵀ
o_t = S_tᵀ q_t / (1 + abs(n_tᵀ q_t))
"""


@pytest.mark.parametrize("text", [SPARSE, LOOP, STAGES], ids=["rows", "loop", "stages"])
def test_rows_of_params_are_right_in_every_gradient(text: str) -> None:
    op = ld.compile(text, backend="torch", chunk_size=8)
    assert ld.parse(str(op.spec)) == op.spec
    assert op.check(B=1, T=21, H=2, K=5, V=4).ok


@ld.recurrence
def rows(
    S,
    q: ld.K,
    k: ld.K,
    v: ld.V,
    U: ld.Param(ld.Vectors(2, ld.K)),
    c: ld.Param(ld.Scalars(2).within(0, 1)),
):
    S = (ld.I - c[0] * ld.outer(U[0], k)) @ S + c[1] * ld.outer(U[1], v)
    return S, S.T @ (q + U[0])


def test_both_fronts_say_the_same() -> None:
    assert rows.spec == ld.parse(SPARSE)


def test_a_row_of_a_param_is_the_same_at_every_token() -> None:
    @ld.recurrence
    def before(S, k: ld.K, v: ld.V, U: ld.Param(ld.Vectors(2, ld.K))):
        S = S + ld.outer(ld.prev(k + U[0]), v)
        return S, S.T @ U[1]

    assert "k_{t-1} + U_{1}" in str(before.spec)


def test_rows_of_a_param_are_no_tokens() -> None:
    with pytest.raises(ArgumentError, match="cannot be laid out as micro-tokens"):
        ld.compile(LOOP, substeps="micro")


@pytest.mark.parametrize(
    ("read", "code", "said"),
    [
        ("U_{3}", "E307", "`U` has rows 1 to 2, not 3"),
        ("U_{x}", "E307", "`x` is no row"),
        ("U_{t,1}", "E203", "write `U_{1}` for its row"),
        ("U_t", "E203", "write `U`"),
        ("U_1", "E201", "did you mean the row `U_{1}`?"),
        ("q_{1}", "E103", "`1` is not an index of `q`"),
        ("S_{1}", "E103", "`1` is not an index of `S`"),
    ],
)
def test_slips_with_rows_are_told(read: str, code: str, said: str) -> None:
    with pytest.raises(DslError) as caught:
        ld.parse(SPARSE.replace("q_t + U_{1}", f"q_t + {read}"))
    assert [m.code for m in caught.value.mistakes] == [code]
    assert said in str(caught.value)
