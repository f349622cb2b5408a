"""The evaluator's ops against direct, wasteful formulas, and its safety under extreme gates."""

from __future__ import annotations

import pytest
import torch
from hand_written import CASES, draw, with_consts
from torch import Tensor

from linalg_dsl.errors import InternalError
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.evaluate import LeafKey, leaf_key, run_backward, run_chunk, run_plan
from linalg_dsl.planner.evaluate_ops import pair_decay, solve, solve_reversed, sum_over_spans
from linalg_dsl.planner.plan import PlanBuilder

TOKENS = 6


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(read: str) -> list[tuple[int, int, range]]:
    """(t, s, tokens of the interval) of every pair of a read."""
    found = []
    for t in range(TOKENS):
        for s in range(t + 1 if read == "inclusive" else t):
            found.append((t, s, range(s + 1, t if read == "exclusive" else t + 1)))
    return found


@pytest.mark.parametrize("read", ["inclusive", "exclusive", "decayed"])
def test_pair_decay_is_the_product_over_the_interval(read: str) -> None:
    w = -randn(TOKENS, 2).abs()
    w[2] = -torch.inf
    expected = torch.zeros(TOKENS, TOKENS, 2, dtype=torch.float64)
    for t, s, interval in pairs(read):
        expected[t, s] = torch.stack([w[i].exp() for i in interval]).prod(0) if interval else 1.0
    torch.testing.assert_close(pair_decay(w, read), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("read", ["inclusive", "exclusive", "decayed"])
def test_span_sum_adds_the_pairs_whose_interval_holds_the_token(read: str) -> None:
    p = randn(TOKENS, TOKENS, 1)
    expected = torch.zeros(TOKENS, 1, dtype=torch.float64)
    for t, s, interval in pairs(read):
        for token in interval:
            expected[token] += p[t, s]
    torch.testing.assert_close(sum_over_spans(p, read), expected)


@pytest.mark.parametrize(("m", "r"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_solve_and_its_reverse_satisfy_their_equations(m: int, r: int) -> None:
    V = 3
    scores = [[randn(TOKENS, TOKENS, seed=10 * i + j) for j in range(m)] for i in range(r)]
    sigma = [[randn(TOKENS, seed=100 + 10 * j + i) for i in range(r)] for j in range(m)]
    w = [randn(TOKENS, V, seed=200 + j) for j in range(m)]
    right = [randn(TOKENS, V, seed=300 + i) for i in range(r)]
    strict = [[g.tril(-1) for g in row] for row in scores]
    z, u = solve(scores, sigma, w, right)
    for j in range(m):
        torch.testing.assert_close(z[j], w[j] + sum(sigma[j][i][:, None] * u[i] for i in range(r)))
    for i in range(r):
        torch.testing.assert_close(u[i], right[i] + sum(strict[i][j] @ z[j] for j in range(m)))
    y, x = solve_reversed(scores, sigma, w, right)
    for j in range(m):
        torch.testing.assert_close(y[j], w[j] + sum(strict[i][j].T @ x[i] for i in range(r)))
    for i in range(r):
        torch.testing.assert_close(x[i], right[i] + sum(sigma[j][i][:, None] * y[j] for j in range(m)))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_chunk_size_does_not_matter(case: object) -> None:
    tensors = draw(case, "strong", seed=21)  # type: ignore[arg-type]
    plan = derive(case.canonical)  # type: ignore[attr-defined]
    given, start = with_consts(tensors), tensors["initial_state"]
    o, final = run_plan(plan, given, start, 1)
    for chunk in (2, 7, 64):
        for got, want in zip(run_plan(plan, given, start, chunk), (o, final), strict=True):
            assert (got - want).abs().max() <= 1e-11 * want.abs().max()


def test_outputs_do_not_depend_on_later_tokens() -> None:
    case = next(c for c in CASES if c.name == "channel_delta")
    tensors = draw(case, "strong", seed=4)
    changed = {n: x.clone() for n, x in tensors.items()}
    for name in ("k", "v", "a", "beta", "q"):
        changed[name][:, 9:] = 0.3 if name != "a" else -1e4
    plan = derive(case.canonical)
    first, second = (run_plan(plan, with_consts(x), x["initial_state"], 17)[0] for x in (tensors, changed))
    torch.testing.assert_close(first[:, :9], second[:, :9], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("gate", [0.0, -1e-7, -60.0, -1e4, -torch.inf])
def test_every_gate_value_gives_finite_numbers_in_float32(gate: float) -> None:
    for name in ("gated_delta", "channel_delta", "low_rank"):
        case = next(c for c in CASES if c.name == name)
        tensors = {n: x.float() for n, x in draw(case, "mild", seed=6).items()}
        for log_gate in {"a", "g"} & tensors.keys():
            tensors[log_gate][:, ::3] = gate
        plan = derive(case.canonical)
        given, start = with_consts(tensors), tensors["initial_state"]
        o, final = run_plan(plan, given, start, 8)
        grads = run_backward(
            backward(plan), plan, given, start, 8, torch.ones_like(o), torch.ones_like(final)
        )
        for x in (o, final, *grads.values()):
            assert x.dtype == torch.float32
            assert torch.isfinite(x).all()


def test_batch_dimensions_broadcast() -> None:
    b = PlanBuilder()
    q = b.add_node("input", (), ("t", "K"), name="q", row=None)
    k = b.add_node("input", (), ("t", "K"), name="k", row=None)
    plan = b.finish("p", [], [("a", b.mask(b.score(q, k), "inclusive"))])
    values: dict[LeafKey, Tensor] = {
        ("input", "q", None): randn(3, 1, 4, 2),
        ("input", "k", None): randn(5, 4, 2),
    }
    got = run_chunk(plan, values).outputs["a"]
    assert got.shape == (3, 5, 4, 4)
    want = (values[("input", "q", None)][2, 0] @ values[("input", "k", None)][3].T).tril()
    torch.testing.assert_close(got[2, 3], want)


def test_rows_of_inputs_and_params_have_keys_of_their_own() -> None:
    b = PlanBuilder()
    whole = b.nodes[b.add_node("input", (), ("t", "K"), name="k", row=None)]
    row = b.nodes[b.add_node("input", (), ("t", "K"), name="k", row=1)]
    state = b.nodes[b.add_node("carry", (), ("K", "V"), name="S", direction="reverse")]
    assert leaf_key(whole) == ("input", "k", None)
    assert leaf_key(row) == ("input", "k", 1)
    assert leaf_key(state) == ("carry", "S", "reverse")


def test_missing_and_misshapen_leaves_are_named() -> None:
    b = PlanBuilder()
    q = b.add_node("input", (), ("t", "K"), name="q", row=None)
    k = b.add_node("input", (), ("t", "K"), name="k", row=None)
    plan = b.finish("p", [], [("a", b.score(q, k))])
    with pytest.raises(InternalError, match="'k'"):
        run_chunk(plan, {("input", "q", None): randn(4, 2)})
    with pytest.raises(InternalError, match="has 3 along K, another leaf 2"):
        run_chunk(plan, {("input", "q", None): randn(4, 2), ("input", "k", None): randn(4, 3)})
