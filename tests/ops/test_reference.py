"""The oracle against loops written out by hand, one per kind of equation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from linalg_dsl.algebra.expr import (
    Dim,
    Expr,
    Symbol,
    add,
    call,
    diag,
    divide,
    hadamard,
    mul,
    negate,
    number,
    outer,
    power,
    transpose,
)
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import Const, Equation, Input, RecurrenceSpec, State
from linalg_dsl.ops.reference import reference

B, T, H, K, V = 2, 5, 4, 3, 6
k, q = Symbol("k", ("K", 1)), Symbol("q", ("K", 1))
v = Symbol("v", ("V", 1))
beta, g = Symbol("beta", (1, 1)), Symbol("g", (1, 1))
past, now = Symbol("S", ("K", "V"), time=-1), Symbol("S", ("K", "V"))
WRITE = outer(k, v)
QKV = (Input("q", ("K",)), Input("k", ("K",)), Input("v", ("V",)))


def make(
    update: Expr,
    output: Expr,
    inputs: tuple[Input, ...] = (),
    consts: tuple[Const, ...] = (),
    more: tuple[tuple[State, Expr], ...] = (),
    dims: tuple[Dim, ...] = ("K", "V"),
) -> RecurrenceSpec:
    return RecurrenceSpec(
        name="sample",
        inputs=QKV + inputs,
        consts=consts,
        states=(State("S", dims), *(s for s, _ in more)),
        updates=(Equation("S", update), *(Equation(s.name, e) for s, e in more)),
        outputs=(Equation("o", output),),
    )


def drawn(spec: RecurrenceSpec, time: int = T, **heads: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {"K": K, "V": V, "n": 2}
    tensors = {}
    for i in spec.inputs:
        count = heads.get(i.name, H)
        lead = (B, time, count) if i.timed else (count,)
        shape = (*lead, *(d if isinstance(d, int) else sizes[d] for d in i.dims))
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[i.name] = (-value.abs() if i.kind == "log_gate" else value).requires_grad_()
    return tensors


def steps(x: dict[str, Tensor], body: Callable[..., tuple[Tensor, ...]], *states: Tensor) -> Tensor:
    """Runs ``body(t's tensors..., *states) -> (o, *states)`` per batch element and head."""
    rows = []
    for b in range(B):
        heads = []
        for h in range(H):
            carried, outs = [s.clone() for s in states], []
            for t in range(T):
                at = {n: (z[b, t, h] if z.dim() > 2 else z[h]) for n, z in x.items()}
                o, *carried = body(at, *carried)
                outs.append(o)
            heads.append(torch.stack(outs))
        rows.append(torch.stack(heads, dim=1))
    return torch.stack(rows)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


DELTA = make(
    add([past, negate(mul([beta, k, add([mul([transpose(k), past]), negate(transpose(v))])]))]),
    mul([Symbol("scale", (1, 1), time=None), transpose(now), q]),
    (Input("beta", ()),),
    (Const("scale", power(Symbol("K", (1, 1), time=None), number("-1/2"))),),
)


def test_delta_rule_with_a_const_that_depends_on_K() -> None:
    def body(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, ...]:
        S = S - x["beta"] * torch.outer(x["k"], x["k"] @ S - x["v"])
        return S.T @ x["q"] / math.sqrt(K), S

    x = drawn(DELTA)
    o, final = reference(DELTA, x)
    assert final is None
    torch.testing.assert_close(o, steps(x, body, zeros(K, V)))
    doubled, _ = reference(DELTA, x, consts={"scale": 2 / math.sqrt(K)})
    torch.testing.assert_close(doubled, 2 * o)


def test_gates_on_both_axes_an_exclusive_read_and_a_bonus() -> None:
    a, c = Symbol("a", ("K", 1)), Symbol("c", ("V", 1))
    u = Symbol("u", ("K", 1), time=None)
    spec = make(
        add([mul([diag(call("exp", [a])), past, diag(call("exp", [c]))]), WRITE]),
        mul([transpose(add([past, mul([diag(u), WRITE])])), q]),
        (
            Input("a", ("K",), "log_gate"),
            Input("c", ("V",), "log_gate"),
            Input("u", ("K",), timed=False),
        ),
    )

    def body(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, ...]:
        o = S.T @ x["q"] + (x["q"] * x["u"] * x["k"]).sum() * x["v"]
        S = x["a"].exp()[:, None] * S * x["c"].exp()[None, :] + torch.outer(x["k"], x["v"])
        return o, S

    x = drawn(spec)
    torch.testing.assert_close(reference(spec, x)[0], steps(x, body, zeros(K, V)))


def test_rows_of_a_matrix_input_and_entries_of_a_list_of_scalars() -> None:
    keys, values = Symbol("p", ("n", "K")), Symbol("w", ("n", "V"))
    first = Symbol("p", ("K", 1), row=0)
    second = Symbol("b", (1, 1), row=1)
    n = Symbol("n", (1, 1), time=None)
    spec = make(
        add([past, mul([transpose(keys), values]), mul([second, first, transpose(v)])]),
        mul([n, transpose(now), q]),
        (Input("p", ("n", "K")), Input("w", ("n", "V")), Input("b", ("n",))),
        (Const("n", number(2)),),
    )

    def body(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, ...]:
        S = S + sum(torch.outer(x["p"][j], x["w"][j]) for j in range(2))
        S = S + x["b"][1] * torch.outer(x["p"][0], x["v"])
        return 2 * S.T @ x["q"], S

    x = drawn(spec)
    torch.testing.assert_close(reference(spec, x)[0], steps(x, body, zeros(K, V)))


def test_two_states_where_one_update_uses_the_other_state_of_the_same_token() -> None:
    momentum = Symbol("M", ("K", "V")), Symbol("M", ("K", "V"), time=-1)
    residual = add([transpose(v), negate(mul([transpose(k), past]))])
    spec = make(
        add([mul([number("0.9"), past]), negate(momentum[0])]),
        mul([transpose(now), q]),
        (Input("beta", ()),),
        more=((State("M"), add([mul([beta, momentum[1]]), negate(mul([k, residual]))])),),
    )

    def body(x: dict[str, Tensor], S: Tensor, M: Tensor) -> tuple[Tensor, ...]:
        M = x["beta"] * M - torch.outer(x["k"], x["v"] - x["k"] @ S)
        S = 0.9 * S - M
        return S.T @ x["q"], S, M

    x = drawn(spec)
    o, final = reference(spec, x, output_final_state=True)
    torch.testing.assert_close(o, steps(x, body, zeros(K, V), zeros(K, V)))
    assert isinstance(final, tuple)
    assert [tuple(s.shape) for s in final] == [(B, H, K, V)] * 2


def test_a_running_maximum_that_starts_at_minus_infinity_and_a_normaliser() -> None:
    z = Symbol("z", (1, 1)), Symbol("z", (1, 1), time=-1)
    top = call("max", [z[1], beta])
    spec = make(
        add([mul([call("exp", [add([z[1], negate(z[0])])]), past]), WRITE]),
        divide(mul([transpose(now), q]), call("max", [call("abs", [z[0]]), number(1)])),
        (Input("beta", ()),),
        more=((State("z", (), -math.inf), top),),
    )

    def body(x: dict[str, Tensor], S: Tensor, m: Tensor) -> tuple[Tensor, ...]:
        new = torch.maximum(m, x["beta"])
        S = torch.exp(m - new) * S + torch.outer(x["k"], x["v"])
        return S.T @ x["q"] / new.abs().clamp(min=1), S, new

    x = drawn(spec)
    expected = steps(x, body, zeros(K, V), torch.tensor(-math.inf, dtype=torch.float64))
    torch.testing.assert_close(reference(spec, x)[0], expected)


def test_a_shifted_input_is_zero_at_the_first_token_of_every_sequence() -> None:
    spec = make(add([past, mul([Symbol("k", ("K", 1), time=-1), transpose(v)])]), mul([transpose(now), q]))
    x = {n: z[:1] for n, z in drawn(spec).items()}
    o, _ = reference(spec, x, cu_seqlens=torch.tensor([0, 2, T]))
    S = zeros(H, K, V)
    for t in range(T):
        S = S if t not in (0, 2) else zeros(H, K, V)
        if t not in (0, 2):
            S = S + x["k"][0, t - 1, :, :, None] * x["v"][0, t, :, None, :]
        torch.testing.assert_close(o[0, t], torch.einsum("hkv,hk->hv", S, x["q"][0, t]))


def test_a_state_declared_V_by_K() -> None:
    before, after = Symbol("S", ("V", "K"), time=-1), Symbol("S", ("V", "K"))
    spec = make(add([before, outer(v, k)]), mul([after, q]), dims=("V", "K"))

    def body(x: dict[str, Tensor], S: Tensor) -> tuple[Tensor, ...]:
        S = S + torch.outer(x["v"], x["k"])
        return S @ x["q"], S

    x = drawn(spec)
    start = torch.randn(B, H, V, K, dtype=torch.float64)
    o, final = reference(spec, x, output_final_state=True)
    torch.testing.assert_close(o, steps(x, body, zeros(V, K)))
    _, moved = reference(spec, x, initial_state=start, output_final_state=True)
    assert isinstance(final, Tensor)
    assert isinstance(moved, Tensor)
    torch.testing.assert_close(moved - final, start)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: math.e**x,
    "sigmoid": lambda x: 1 / (1 + math.e**-x),
    "logsigmoid": lambda x: -torch.log(1 + math.e**-x),
    "softplus": lambda x: torch.log(1 + math.e**x),
    "tanh": lambda x: (math.e ** (2 * x) - 1) / (math.e ** (2 * x) + 1),
    "silu": lambda x: x / (1 + math.e**-x),
    "relu": lambda x: torch.where(x > 0, x, 0 * x),
    "elu": lambda x: torch.where(x > 0, x, math.e**x - 1),
    "abs": lambda x: torch.where(x > 0, x, -x),
    "sign": lambda x: torch.where(x > 0, x / x, -x / x),
    "l2norm": lambda x: x / ((x**2).sum() + 1e-6) ** 0.5,
    "softmax": lambda x: math.e**x / (math.e**x).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name: str) -> None:
    spec = make(WRITE, call(name, [mul([transpose(now), q])]))
    x = drawn(spec)
    o, _ = reference(spec, x)
    for t in range(T):
        value = (x["k"] * x["q"]).sum(-1)[0, t, 0] * x["v"][0, t, 0]
        torch.testing.assert_close(o[0, t, 0], FUNCTIONS[name](value))


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt"])
def test_function_of_a_positive_number(name: str) -> None:
    square = hadamard([v, v])
    spec = make(WRITE, call(name, [square]))
    x = drawn(spec)
    square_of_v = x["v"] ** 2
    want = {"log": square_of_v.log(), "sqrt": x["v"].abs(), "rsqrt": 1 / x["v"].abs()}[name]
    torch.testing.assert_close(reference(spec, x)[0], want)


def test_functions_of_several_arguments() -> None:
    w = Symbol("w", ("V", 1))
    total = add(
        [
            call("clamp", [v, number("-0.5"), number("0.25")]),
            call("min", [v, w]),
            call("max", [v, number("0.1")]),
            mul([call("dot", [v, w]), w]),
            mul([call("sum", [v]), w]),
            hadamard([v, w, w]),
            divide(w, power(call("exp", [v]), beta)),
        ]
    )
    spec = make(WRITE, total, (Input("w", ("V",)), Input("beta", ())))
    x = drawn(spec)
    a, b, e = x["v"], x["w"], x["beta"]
    want = a.clamp(-0.5, 0.25) + torch.where(a < b, a, b) + a.clamp(min=0.1)
    want = want + (a * b).sum(-1, keepdim=True) * b + a.sum(-1, keepdim=True) * b
    want = want + a * b**2 + b * torch.exp(-a * e[..., None])
    torch.testing.assert_close(reference(spec, x)[0], want)


def test_softplus_is_exact_beyond_20_where_torch_has_a_cut() -> None:
    spec = make(WRITE, call("softplus", [v]))
    x = drawn(spec)
    x["v"] = torch.full_like(x["v"], 21.0)
    o, _ = reference(spec, x)
    assert (o - 21).min() > 7e-10


def test_fewer_heads_are_repeated_in_groups_and_their_gradients_added_up() -> None:
    x = drawn(DELTA, q=2, k=2, beta=1)
    wide = {n: z.detach().repeat_interleave(H // z.shape[2], 2).requires_grad_() for n, z in x.items()}
    o, wide_o = reference(DELTA, x)[0], reference(DELTA, wide)[0]
    torch.testing.assert_close(o, wide_o)
    grads = torch.autograd.grad(o.square().sum(), list(x.values()))
    wide_grads = torch.autograd.grad(wide_o.square().sum(), list(wide.values()))
    for got, want, tensor in zip(grads, wide_grads, x.values(), strict=True):
        groups = want.reshape(*want.shape[:2], tensor.shape[2], -1, *want.shape[3:])
        torch.testing.assert_close(got, groups.sum(3))


def test_packed_sequences_equal_each_one_alone_and_empty_ones_hand_on_their_state() -> None:
    x = {n: z[:1] for n, z in drawn(DELTA).items()}
    bounds = [0, 0, 3, 3, T]
    start = torch.randn(4, H, K, V, dtype=torch.float64)
    o, final = reference(
        DELTA, x, initial_state=start, output_final_state=True, cu_seqlens=torch.tensor(bounds)
    )
    assert isinstance(final, Tensor)
    for n, (a, b) in enumerate(itertools.pairwise(bounds)):
        alone, last = reference(
            DELTA,
            {i: z[:, a:b] for i, z in x.items()},
            initial_state=start[n : n + 1],
            output_final_state=True,
        )
        assert isinstance(last, Tensor)
        assert torch.equal(o[:, a:b], alone)
        assert torch.equal(final[n], last[0])
    assert torch.equal(final[0], start[0])
    assert torch.equal(final[2], start[2])


def test_no_token_at_all() -> None:
    x = drawn(DELTA, time=0)
    o, final = reference(DELTA, x, output_final_state=True)
    assert o.shape == (B, 0, H, V)
    assert isinstance(final, Tensor)
    assert torch.equal(final, zeros(B, H, K, V))


def test_a_log_gate_of_minus_infinity_forgets_and_leaves_finite_gradients() -> None:
    spec = make(
        add([mul([call("exp", [g]), past]), WRITE]),
        mul([transpose(now), q]),
        (Input("g", (), "log_gate"),),
    )
    x = drawn(spec)
    gate = x["g"].detach().clone()
    gate[:, 2] = -math.inf
    x["g"] = gate.requires_grad_()
    o, _ = reference(spec, x)
    tail, _ = reference(spec, {n: z[:, 2:] for n, z in x.items()})
    torch.testing.assert_close(o[:, 2:], tail)
    grads = torch.autograd.grad(o.square().sum(), list(x.values()))
    assert all(torch.isfinite(d).all() for d in grads)
    assert not grads[-1][:, 2].any()


def test_first_and_second_derivatives() -> None:
    small = {n: z.detach()[:1, :2, :1].requires_grad_() for n, z in drawn(DELTA).items()}
    start = torch.randn(1, 1, K, V, dtype=torch.float64, requires_grad=True)

    def run(start: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(small, values, strict=True))
        o, final = reference(DELTA, named, initial_state=start, output_final_state=True)
        assert isinstance(final, Tensor)
        return o, final

    assert torch.autograd.gradcheck(run, (start, *small.values()))
    assert torch.autograd.gradgradcheck(run, (start, *small.values()))


def test_type_of_the_computation() -> None:
    x = {n: z.detach().bfloat16() for n, z in drawn(DELTA).items()}
    assert reference(DELTA, x)[0].dtype == torch.float32
    o, final = reference(DELTA, x, output_final_state=True, dtype=torch.float64)
    assert isinstance(final, Tensor)
    assert o.dtype == final.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("k"), "missing argument 'k'"),
        (lambda x: x.update(z=x["k"]), "no input 'z'"),
        (lambda x: x.update(k=x["k"][..., 0]), r"k has 3 axes, expected \[B, T, H, K\]"),
        (lambda x: x.update(k=x["k"][..., :-1]), "axis K has size 2, expected 3"),
        (lambda x: x.update(v=x["v"][:, :-1]), "v has batch and time"),
        (lambda x: x.update(v=x["v"][:, :, :3]), "v has 3 heads"),
    ],
)
def test_wrong_tensors_are_named(change: Callable[[dict[str, Tensor]], object], message: str) -> None:
    x = drawn(DELTA)
    change(x)
    with pytest.raises(ArgumentError, match=message):
        reference(DELTA, x)


def test_wrong_options_are_named() -> None:
    x = drawn(DELTA)
    with pytest.raises(ArgumentError, match="cu_seqlens needs batch 1, got 2"):
        reference(DELTA, x, cu_seqlens=torch.tensor([0, T]))
    with pytest.raises(ArgumentError, match="must rise from 0 to 5"):
        reference(DELTA, {n: z[:1] for n, z in x.items()}, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ArgumentError, match="has no const 'tau'"):
        reference(DELTA, x, consts={"tau": 1.0})
    with pytest.raises(ArgumentError, match="initial state S has shape"):
        reference(DELTA, x, initial_state=zeros(1, H, K, V))
