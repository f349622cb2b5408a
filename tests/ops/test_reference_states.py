"""The oracle with several states, states of all shapes and functions of reads, against loops by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from state_recurrences import TEXTS, text
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.draw import draw, draw_state
from linalg_dsl.ops.reference import reference
from linalg_dsl.testing.strategies_exprs import specs_of_several_states

B, T, H, K, V = 2, 6, 2, 3, 4
INF = float("inf")
Tensors = dict[str, Tensor]
Step = Callable[[dict[str, Tensor], dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] * y[None, :]


def mlstm(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    m = torch.maximum(x["f"] + s["m"], x["i"])
    keep, add = torch.exp(x["f"] + s["m"] - m), torch.exp(x["i"] - m)
    S = keep * s["S"] + add * outer(x["k"], x["v"])
    n = keep * s["n"] + add * x["k"]
    o = S.T @ x["q"] / torch.maximum((n @ x["q"]).abs(), torch.exp(-m))
    return o, {"m": m, "S": S, "n": n}


def gsa(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    a = x["g"].exp()
    A = s["A"] * a[None, :] + outer(x["k"], 1 - a)
    B_ = a[:, None] * s["B"] + outer(1 - a, x["v"])
    return B_.T @ torch.softmax(A.T @ x["q"], 0), {"A": A, "B": B_}


def rwkv4(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    """Without a stabiliser: sums of exp in plain numbers."""
    k, v, w, u = x["k"].exp(), x["v"], x["w"], x["u"].exp()
    above, below = s["n"] * s["p"].exp(), s["d"] * s["p"].exp()
    o = (above + u * k * v) / (below + u * k)
    above, below = above * (-w).exp() + k * v, below * (-w).exp() + k
    p = torch.maximum(s["p"] - w, x["k"])
    return o, {"p": p, "n": above / p.exp(), "d": below / p.exp()}


def momentum_delta(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    M = x["mu"] * s["M"] - x["eta"] * outer(x["k"], x["v"] - s["S"].T @ x["p"])
    S = x["alpha"] * s["S"] - x["beta"] * M
    return S.T @ x["q"], {"M": M, "S": S}


def mamba1(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    S = torch.exp(-torch.exp(x["A"]) * x["delta"][None, :]) * s["S"] + outer(x["B"], x["delta"] * x["x"])
    return S.T @ x["C"] + x["D"] * x["x"], {"S": S}


def gated_oja(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    R = s["S"] * x["a"].exp()[None, :]
    S = R - x["beta"] * outer(R @ x["v"], x["v"]) + x["beta"] * outer(x["k"], x["v"])
    return S.T @ x["q"], {"S": S}


def two_layers(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    A = s["A"] + outer(x["k"], x["v"])
    u = torch.nn.functional.silu(A.T @ x["q"])
    return s["B"].T @ x["q"] + u, {"A": A, "B": s["B"] + outer(x["p"], u)}


def lightnet(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    z = torch.logaddexp(s["z"], x["kappa"])
    S = (s["z"] - z).exp()[:, None] * s["S"] + outer((x["kappa"] - z).exp(), x["v"])
    return S.T @ x["q"], {"z": z, "S": S}


def reads_on_the_key_side(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    S = s["S"] + outer(x["k"], x["v"])
    return x["r"] @ (S @ x["q"]), {"S": S}


def dense(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    S = x["M"] @ s["S"] @ x["N"] + outer(x["k"], x["v"])
    return S.T @ x["q"], {"S": S}


def gated_delta_product(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    S = x["g"].exp() * s["S"]
    for k, v, beta in zip(x["k"], x["v"], x["beta"], strict=True):
        S = S - beta * outer(k, S.T @ k - v)
    return S.T @ x["q"], {"S": S}


def mamba3(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    a, d = torch.exp(-x["A"] * x["delta"]), x["delta"]
    S = a * s["S"] + (1 - x["lam"]) * d * a * outer(s["B_prev"], s["x_prev"])
    S = S + x["lam"] * d * outer(x["B"], x["x"])
    return S.T @ x["C"], {"S": S, "B_prev": x["B"], "x_prev": x["x"]}


def shifted_bindings(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    def unit(k: Tensor) -> Tensor:
        return x["mu"] * k / torch.sqrt((x["mu"] * k) @ (x["mu"] * k) + 1e-6)

    mixed = x["mu"] * unit(x["k"]) + (1 - x["mu"]) * unit(s["k_prev"])
    S = s["g_prev"].exp()[:, None] * s["S"] + outer(mixed, x["v"])
    return S.T @ x["q"], {"S": S, "k_prev": x["k"], "g_prev": x["g"]}


def substeps_of_everything(x: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
    m = s["m"] + 1
    for i in range(2):
        m = torch.maximum(m, x["beta"][i] + x["q"] @ x["k"][i])
    q, S = x["q"] / m, s["S"]
    for j in range(2):
        y = x["k"][j] + s["k_prev"][j]
        y = y / torch.sqrt(y @ y + 1e-6)
        R = x["a"][j].exp() * S
        S = R - x["beta"][j] * outer(y, R.T @ y - x["v"][j]) / m
    for _ in range(3):
        S = S - outer(q, S.T @ q) / 20 + outer(q, x["v"][0]) + 0.1 * s["S"]
    return S.T @ q + s["S"].T @ x["q"], {"m": m, "S": S, "k_prev": x["k"]}


BY_HAND: dict[str, Step] = {
    f.__name__: f
    for f in (
        mlstm, gsa, rwkv4, momentum_delta, mamba1, gated_oja, two_layers, lightnet,
        reads_on_the_key_side, dense, gated_delta_product, mamba3, shifted_bindings, substeps_of_everything,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_every_step_is_what_stands_there(name: str) -> None:
    spec = parse(text(name))
    x = draw(spec, B, T, H, K, V)
    given = draw_state(spec, B, H, K, V, seed=1)
    o, last = reference(spec, x, initial_state=given, output_final_state=True)
    last = (last,) if isinstance(last, Tensor) else last
    for b in range(B):
        for h in range(H):
            states = {n: g[b, h] for n, g in zip(spec.carried, given, strict=True)}
            for t in range(T):
                now = {i.name: x[i.name][b, t, h] if i.timed else x[i.name][h] for i in spec.inputs}
                out, states = BY_HAND[name](now, states)
                torch.testing.assert_close(o[b, t, h], out, rtol=1e-12, atol=1e-12)
            for carried, final in zip(spec.carried, last, strict=True):
                torch.testing.assert_close(final[b, h], states[carried], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", TEXTS)
def test_a_sequence_in_two_pieces_is_one_sequence(name: str) -> None:
    spec = parse(text(name))
    x = draw(spec, B, T, H, K, V)
    timed = {i.name for i in spec.inputs if i.timed}
    whole, after = reference(spec, x, output_final_state=True)
    first, between = reference(
        spec, {n: a[:, :2] if n in timed else a for n, a in x.items()}, output_final_state=True
    )
    second, last = reference(
        spec,
        {n: a[:, 2:] if n in timed else a for n, a in x.items()},
        initial_state=between,
        output_final_state=True,
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(last, after)


@pytest.mark.parametrize("name", TEXTS)
def test_packed_sequences_start_anew(name: str) -> None:
    spec = parse(text(name))
    x = draw(spec, 1, T, H, K, V)
    timed = {i.name for i in spec.inputs if i.timed}
    packed, after = reference(spec, x, output_final_state=True, cu_seqlens=torch.tensor([0, 2, 2, T]))
    alone, last = reference(
        spec, {n: a[:, 2:] if n in timed else a for n, a in x.items()}, output_final_state=True
    )
    torch.testing.assert_close(packed[:, 2:], alone)
    many = [after] if isinstance(after, Tensor) else after
    one = [last] if isinstance(last, Tensor) else last
    starts = [s.start for s in spec.states] + [0.0 for _ in spec.shifted]
    for a, b, start in zip(many, one, starts, strict=True):
        torch.testing.assert_close(a[2:], b)
        assert bool((a[1] == start).all())


@pytest.mark.parametrize("name", TEXTS)
def test_gradients_are_finite_from_the_declared_start_on(name: str) -> None:
    spec = parse(text(name))
    x = {n: a.requires_grad_() for n, a in draw(spec, B, T, H, K, V).items()}
    o, last = reference(spec, x, output_final_state=True)
    total = o.sin().sum() + sum(s.sin().sum() for s in ([last] if isinstance(last, Tensor) else last))
    for gradient in torch.autograd.grad(total, list(x.values()), allow_unused=True):
        assert gradient is not None
        assert bool(gradient.isfinite().all())


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(specs_of_several_states())
def test_any_spec_goes_on_where_it_stopped(spec: RecurrenceSpec) -> None:
    x = {n: a.float().double() for n, a in draw(spec, 1, 4, 1, K, V).items()}
    timed = {i.name for i in spec.inputs if i.timed}
    whole, after = reference(spec, x, output_final_state=True)
    between, outs = None, []
    for begin in (0, 3):
        piece = {n: a[:, begin : begin + 3] if n in timed else a for n, a in x.items()}
        o, between = reference(spec, piece, initial_state=between, output_final_state=True)
        outs.append(o)
    torch.testing.assert_close(torch.cat(outs, 1), whole, equal_nan=True)
    torch.testing.assert_close(between, after, equal_nan=True)


def test_several_states_come_back_by_name_and_go_in_by_order_or_name() -> None:
    spec = parse(text("mlstm"))
    x = draw(spec, B, T, H, K, V)
    _, last = reference(spec, x, output_final_state=True)
    assert last._fields == ("m", "S", "n")
    assert [tuple(s.shape) for s in last] == [(B, H), (B, H, K, V), (B, H, K)]
    by_order, _ = reference(spec, x, initial_state=last)
    by_name, _ = reference(spec, x, initial_state=last._asdict())
    assert torch.equal(by_order, by_name)


def test_a_state_of_minus_infinity_is_as_good_as_none() -> None:
    spec = parse(text("mlstm"))
    x = draw(spec, B, T, H, K, V)
    start = (torch.full((B, H), -INF), torch.randn(B, H, K, V), torch.randn(B, H, K))
    fresh, _ = reference(spec, x)
    o, _ = reference(spec, x, initial_state=start)
    torch.testing.assert_close(o, fresh)


def test_a_shift_is_handed_on_under_its_own_name() -> None:
    spec = parse(text("mamba3"))
    x = draw(spec, B, T, H, K, V)
    _, last = reference(spec, x, output_final_state=True)
    assert last._fields == ("S", "B_prev", "x_prev")
    assert torch.equal(last.B_prev, x["B"][:, -1])
    assert torch.equal(last.x_prev, x["x"][:, -1])


def test_what_is_not_handed_in_is_as_declared() -> None:
    spec = parse(text("mlstm"))
    x = draw(spec, B, T, H, K, V)
    S = torch.randn(B, H, K, V, dtype=torch.float64)
    start = (torch.full((B, H), -INF), S, torch.zeros(B, H, K))
    whole, _ = reference(spec, x, initial_state=start)
    for some in ((None, S, None), {"S": S}, {"S": S, "n": None}):
        assert torch.equal(reference(spec, x, initial_state=some)[0], whole)
    for wrong in ((S,), {"R": S}):
        with pytest.raises(ArgumentError, match="initial_state"):
            reference(spec, x, initial_state=wrong)


def test_a_state_with_substeps_may_be_asked_for_in_a_substep() -> None:
    head = "recurrence r\nstate y, x : [K]\ninput k, p : [2, K]\n"
    first = "for j in 1..2:\n    x_t = x_t / 2 + k_{t,j}\n"
    nested = parse(head + first + "for j in 1..2:\n    y_t = y_t / 2 + x_t ⊙ p_{t,j}\no_t = y_t")
    plain = parse(head + first + "y_t = (y_{t-1} / 2 + x_t ⊙ p_{t,1}) / 2 + x_t ⊙ p_{t,2}\no_t = y_t")
    x = draw(nested, B, T, H, K, V)
    torch.testing.assert_close(reference(nested, x)[0], reference(plain, x)[0])


def test_a_const_says_how_many_substeps_there_are() -> None:
    spec = parse(text("gated_delta_product"))
    five = draw(spec, B, T, H, K, V, consts={"n": 5})
    o, _ = reference(spec, five, consts={"n": 5})
    written = text("gated_delta_product").replace("const n = 3", "const n = 5")
    again, _ = reference(parse(written), five)
    assert torch.equal(o, again)
