from __future__ import annotations

import pytest
import torch

from linalg_dsl.algebra.expr import SCALAR, Expr, Symbol, diag, mul, outer, transpose
from linalg_dsl.algebra.normalise import Normaliser, flip
from linalg_dsl.algebra.rules import Word, is_small
from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_expr
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.evaluate_tokens import evaluate

k, p, a = (Symbol(n, ("K", 1)) for n in "kpa")
v = Symbol("v", ("V", 1))
beta = Symbol("beta", SCALAR)
keys, values, betas = Symbol("x", ("n", "K")), Symbol("y", ("n", "V")), Symbol("z", ("n", 1))
normaliser = Normaliser({"n": 2})

HEADER = """recurrence test
const n = 2
input k, p, a : [K]
input v : [V]
input beta : scalar
input x : [n, K]
input y : [n, V]
input z : [n]
"""
VECTORS = {
    "beta_t k_t": "beta_t k_t",
    "k_t ⊙ (beta_t p_t)": "beta_t (k_t ⊙ p_t)",
    "diag(a_t) k_t beta_t": "beta_t (a_t ⊙ k_t)",
    "k_t (k_tᵀ p_t)": "dot(k_t, p_t) k_t",
    "(k_t k_tᵀ) diag(a_t) p_t": "dot(k_t ⊙ a_t, p_t) k_t",
    "(I - beta_t k_t k_tᵀ) p_t": "p_t - beta_t dot(k_t, p_t) k_t",
    "(p_tᵀ (I - k_t k_tᵀ))ᵀ": "p_t - dot(k_t, p_t) k_t",
    "k_t / (1 + k_tᵀ k_t)": "(1 / (1 + dot(k_t, k_t))) k_t",
    "k_t / exp(p_t)": "k_t / exp(p_t)",
    "exp(2 k_t)": "exp(2 k_t)",
    "exp(k_tᵀ)ᵀ": "exp(k_t)",
    "x_tᵀ z_t": "z_{t,1} x_{t,1} + z_{t,2} x_{t,2}",
    "x_tᵀ diag(z_t) x_t k_t": "z_{t,1} dot(x_{t,1}, k_t) x_{t,1} + z_{t,2} dot(x_{t,2}, k_t) x_{t,2}",
    "sigmoid(x_t)ᵀ z_t": "z_{t,1} sigmoid(x_{t,1}) + z_{t,2} sigmoid(x_{t,2})",
    "x_{t,2} ⊙ k_t": "x_{t,2} ⊙ k_t",
    "k_t - k_t + p_t": "p_t",
    "sum(z_t) k_t": "(z_{t,1} + z_{t,2}) k_t",
    "dot(z_t, z_t) k_t": "(z_{t,1} z_{t,1} + z_{t,2} z_{t,2}) k_t",
    "sum(beta_t k_t ⊙ p_t) k_t": "beta_t dot(k_t, p_t) k_t",
    "(beta_t / (2 beta_t + 1)) k_t": "beta_t (1 / (2 beta_t + 1)) k_t",
    "x_tᵀ ((k_tᵀ p_t) (x_t k_t))": "dot(k_t, p_t) (dot(x_{t,1}, k_t) x_{t,1} + dot(x_{t,2}, k_t) x_{t,2})",
    "k_t k_tᵀ (p_tᵀ a_t) k_t": "dot(p_t, a_t) dot(k_t, k_t) k_t",
    "l2norm(z_t)ᵀ x_t": None,
    "softmax(z_t)ᵀ x_t": None,
    "min(k_t, p_t) + max(beta_t, 0)": "min(k_t, p_t) + max(beta_t, 0)",
    "beta_t k_t + beta_t p_t": "beta_t (k_t + p_t)",
    "beta_t (k_t ⊙ a_t) - p_t ⊙ k_t": "k_t ⊙ (beta_t a_t - p_t)",
    "k_t ⊙ p_t - p_t": "p_t ⊙ (k_t - 1)",
    "k_t^2 ⊙ p_t": "k_t^2 ⊙ p_t",
}


def _vector(text: str) -> tuple[Expr, str]:
    row = text.startswith(("l2norm(z", "softmax(z"))
    vector = f"({text})ᵀ" if row else text
    return parse(f"{HEADER}S_t = S_{{t-1}} + k_t v_tᵀ\no_t = S_tᵀ ({vector})\n").outputs[0].value, vector


@pytest.mark.parametrize("text", VECTORS)
def test_normal_form_and_its_value(text: str) -> None:
    _, vector = _vector(text)
    spec = parse(f"{HEADER}S_t = S_{{t-1}} + ({vector}) v_tᵀ\no_t = S_tᵀ k_t\n")
    column = spec.updates[0].value.children[1].children[:-1]
    normal = normaliser.normal(mul(column))
    if VECTORS[text] is not None:
        assert show_expr(normal) == VECTORS[text]
    # the written vector, seen through one step of the reference: S_1 = x v with v = 1
    tensors = draw(spec, B=2, T=1, H=2, K=4, V=1, dtype=torch.float64, seed=5)
    tensors["v"] = torch.ones_like(tensors["v"])
    _, state = reference(spec, tensors, output_final_state=True)

    def value_of(symbol: Symbol) -> torch.Tensor:
        tensor = tensors[symbol.name][:, 0]
        assert not isinstance(symbol.row, str)
        if symbol.row is None:
            return tensor
        return tensor[..., symbol.row] if symbol.is_scalar else tensor[..., symbol.row, :]

    torch.testing.assert_close(evaluate(normal, value_of), state[..., 0], rtol=1e-12, atol=1e-12)


def test_scalars_stand_outside_of_vectors() -> None:
    found = normaliser.factors(mul((beta, diag(a), k, transpose(p), k)))
    assert found.vectors == (a, k)
    assert [show_expr(s) for s in found.scalars] == ["beta_t", "dot(p_t, k_t)"]


def test_unroll_writes_out_rows() -> None:
    words = normaliser.unroll(Word(chain=(transpose(keys), diag(betas), values)))
    assert [show_expr(w.expr()) for w in words] == ["z_{t,1} x_{t,1} y_{t,1}ᵀ", "z_{t,2} x_{t,2} y_{t,2}ᵀ"]


def test_unroll_of_two_small_axes_is_a_double_sum() -> None:
    words = normaliser.unroll(Word(chain=(transpose(keys), keys, transpose(keys), values)))
    assert len(words) == 4


def test_collapse_gives_a_diagonal_or_an_outer_product() -> None:
    diagonal = normaliser.collapse(Word(chain=(diag(a), diag(k))))
    assert (diagonal.diagonal, diagonal.column, diagonal.row) == ((a, k), (), ())
    outer_product = normaliser.collapse(Word(chain=(diag(a), k, transpose(p), diag(a))))
    assert (outer_product.diagonal, outer_product.column, outer_product.row) == ((), (a, k), (p, a))
    product = normaliser.collapse(Word(chain=(k, transpose(p), k, transpose(p))))
    assert (product.column, product.row) == ((k,), (p,))
    assert [show_expr(s) for s in product.scale.scalars] == ["dot(p_t, k_t)"]


def test_a_dense_matrix_is_refused() -> None:
    with pytest.raises(DslError, match="dense matrix"):
        normaliser.collapse(Word(chain=(Symbol("M", ("K", "K")), k)))
    with pytest.raises(DslError, match="matrix"):
        normaliser.normal(outer(k, v))


def test_flip_turns_rows_of_functions_into_columns() -> None:
    row = parse(f"{HEADER}S_t = S_{{t-1}} + k_t exp(-v_t)ᵀ\no_t = S_tᵀ k_t\n").updates[0].value.children[1]
    assert show_expr(flip(row.children[-1])) == "exp(-v_t)"


def test_small_axes_are_those_beside_k_and_v() -> None:
    assert [is_small(d) for d in ("K", "V", 1, "n", 3)] == [False, False, False, True, True]
