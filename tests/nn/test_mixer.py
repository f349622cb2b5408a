"""A layer from a spec: every input is made as declared, pieces equal the whole, heads can be split."""

from __future__ import annotations

import math
import pickle
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import linalg_dsl as ld
from linalg_dsl.errors import ArgumentError
from linalg_dsl.nn.inputs import TokenInput
from linalg_dsl.nn.roles import role_of
from linalg_dsl.ops.catalogue import catalogue_names
from linalg_dsl.ops.promises import check_promises

SMALL = {"m": 4, "n": 2}


def small_mixer(name: str, **options: Any) -> ld.nn.Mixer:
    torch.manual_seed(0)
    spec = getattr(ld.ops, name).spec
    consts = {c: n for c, n in SMALL.items() if any(x.name == c for x in spec.consts)}
    return ld.nn.Mixer(name, 16, 2, **{"head_dim": 4, "value_dim": 6, "consts": consts, **options})


def in_pieces(mixer: nn.Module, x: Tensor, first: int, in_place: bool = False) -> Tensor:
    y, state = mixer(x[:, :first], return_state=True)
    pieces = [y]
    for t in range(first, x.shape[1]):
        y, state = mixer(x[:, t : t + 1], state, return_state=True, in_place=in_place)
        pieces.append(y)
    return torch.cat(pieces, dim=1)


@pytest.mark.filterwarnings("ignore:.* is computed token after token")
@pytest.mark.parametrize("name", catalogue_names())
def test_every_entry_is_a_layer(name: str) -> None:
    mixer = small_mixer(name)
    x = torch.randn(2, 9, 16)
    values, _ = mixer.make_inputs(10 * x)
    check_promises(mixer.spec, [values[d.name].detach() for d in mixer.spec.inputs])
    y = mixer(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    missing = [n for n, p in mixer.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]
    assert not missing
    torch.testing.assert_close(in_pieces(mixer, x, 4), y, rtol=1e-4, atol=1e-5)
    packed = mixer(x.flatten(0, 1)[None], cu_seqlens=torch.tensor([0, 9, 9, 18]))
    torch.testing.assert_close(packed, y.flatten(0, 1)[None], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for in_place in (False, True):  # by decode steps
            torch.testing.assert_close(in_pieces(mixer, x, 4, in_place), y, rtol=1e-4, atol=1e-5)
        assert bool(mixer(torch.randn(1, 200, 16)).isfinite().all())  # no state explodes at the start


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "mamba2", "delta_product", "rwkv7", "mlstm"])
def test_roles_follow_from_declarations(name: str) -> None:
    wanted = {
        "gated_delta_rule": {"q": "query", "k": "vector", "v": "vector", "g": "decay", "beta": "ranged"},
        "gla": {"q": "query", "k": "vector", "v": "vector", "g": "gate"},
        "mamba2": {"x": "vector", "dt": "step", "B": "vector", "C": "query", "a": "param", "d": "param"},
        "delta_product": {"q": "query", "k": "vector", "v": "vector", "beta": "ranged"},
        "rwkv7": {"w": "raw", "a": "ranged", "xi": "param", "alpha": "param", "rho": "param"},
        "mlstm": {"i": "raw", "f": "raw"},
    }[name]
    spec = getattr(ld.ops, name).spec
    roles = {d.name: role_of(spec, d) for d in spec.inputs}
    assert {n: roles[n].kind for n in wanted} == wanted
    if name == "gated_delta_rule":  # a query is normalised beside normalised keys
        assert [n for n, r in roles.items() if r.norm] == ["q", "k"]
        assert [n for n, r in roles.items() if r.conv] == ["q", "k", "v"]
    if name == "gla":
        assert roles["g"].rank == 16
        assert not roles["q"].norm


def test_the_defaults_are_the_published_formulas() -> None:
    mixer = small_mixer("gated_delta_rule", conv_size=0).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    made: Any = mixer.inputs
    found, _ = mixer.make_inputs(x)

    def heads(name: str) -> Tensor:
        return cast(Tensor, made[name].project(x)).view(2, 5, 2, -1)

    silu, normalize = nn.functional.silu, nn.functional.normalize
    torch.testing.assert_close(found["k"], normalize(silu(heads("k")), dim=-1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["v"], silu(heads("v")))
    rate = nn.functional.softplus(heads("g").squeeze(-1) + made["g"].bias)
    torch.testing.assert_close(found["g"], -made["g"].log_rate.exp() * rate)
    torch.testing.assert_close(
        found["beta"], 2 * torch.sigmoid(heads("beta").squeeze(-1) + made["beta"].bias)
    )
    o = mixer.op(**found)
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5)
    assert mixer.gate is not None
    y = mixer.out(normed.flatten(2) * silu(mixer.gate(x)))
    torch.testing.assert_close(mixer(x), y)
    gla: Any = small_mixer("gla", head_dim=16).inputs["g"]
    low = gla.project(gla.down(x.float())).view(2, 5, 2, 16)
    torch.testing.assert_close(gla(x.float())[0], nn.functional.logsigmoid(low + gla.bias) / 16)


def test_gates_begin_as_published() -> None:
    torch.manual_seed(0)
    mixer = ld.nn.Mixer("gated_delta_rule", 512, 64, head_dim=4, value_dim=4)
    g: Any = mixer.inputs["g"]
    assert 0 <= g.log_rate.min() < 1
    assert math.log(14) < g.log_rate.max() <= math.log(16)
    steps = nn.functional.softplus(g.bias)
    assert 1e-3 * 0.99 <= steps.min() < 3e-3
    assert 3e-2 < steps.max() <= 0.1 * 1.01


INVENTED = """
recurrence invented
input q, k : [K]
input v : [V]
input a : {kind}
S_t = {gate} S_{{t-1}} + k_t v_tᵀ
o_t = S_tᵀ q_t
"""


@pytest.mark.parametrize(
    ("kind", "gate"),
    [
        ("scalar", "exp(-softplus(a_t))"),
        ("scalar", "sigmoid(a_t)"),
        ("scalar", "sigmoid(a_t)^4"),
        ("[K]", "diag(sigmoid(a_t))"),
        ("[K]", "diag(exp(-exp(a_t)))"),
        ("scalar in (0, 1)", "(1 - a_t)"),
        ("gate in (-1, 1)", "a_t"),
    ],
)
def test_a_gate_of_any_form_begins_by_keeping_the_state(kind: str, gate: str) -> None:
    torch.manual_seed(0)
    mixer = ld.nn.Mixer(INVENTED.format(kind=kind, gate=gate), 16, 2)
    values, _ = mixer.make_inputs(torch.zeros(1, 1, 16))
    assert isinstance(mixer.inputs["a"], TokenInput)
    start = torch.ones(1, 2, 8, 8)
    _, last = mixer.op(**values, initial_state=start, output_final_state=True)
    assert 0.89 <= last.min() <= last.max() <= 1.0


def test_states_that_rotate_into_each_other_do_not_grow() -> None:
    mixer = small_mixer("lru")
    _, state = mixer(
        torch.zeros(1, 400, 16),
        ld.nn.MixerState((torch.ones(1, 2, 4), torch.ones(1, 2, 4)), {}),
        return_state=True,
    )
    assert max(float(x.detach().abs().max()) for x in state.memory) < 2


def test_inputs_are_replaced_by_name() -> None:
    gate = nn.Linear(16, 2)
    mixer = small_mixer("gated_delta_rule", inputs={"g": lambda x: -torch.exp(gate(x))})
    x = torch.randn(1, 6, 16)
    values, _ = mixer.make_inputs(x)
    torch.testing.assert_close(values["g"], -torch.exp(gate(x)))
    assert "g" not in mixer.inputs
    assert mixer(x).shape == x.shape

    class Phase(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angle = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            angle = self.angle(x).view(*x.shape[:2], 2, 4)
            return angle.cos(), angle.sin()

    rotating = small_mixer("gateloop", inputs={("c", "s"): Phase()})
    rotating(x).sum().backward()
    assert rotating.get_parameter("inputs.c+s.angle.weight").grad is not None
    constant = small_mixer("retnet", inputs={"gamma": lambda: torch.tensor([0.9, 0.5])})
    assert constant.make_inputs(x)[0]["gamma"].tolist() == pytest.approx([0.9, 0.5])


def test_inputs_may_have_fewer_heads() -> None:
    mixer = ld.nn.Mixer("mamba2", 16, 4, heads={"B": 1, "C": 2})
    x = torch.randn(2, 7, 16)
    values, _ = mixer.make_inputs(x)
    assert [values[n].shape[2] for n in ("x", "dt", "B", "C")] == [4, 4, 1, 2]
    torch.testing.assert_close(in_pieces(mixer, x, 3), mixer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["kda", "gla", "mamba2", "rwkv6", "gsa"])
def test_shards_of_the_heads_add_up_to_the_layer(name: str) -> None:
    spec = getattr(ld.ops, name).spec
    consts = {"m": 4} if name == "gsa" else {}
    heads = {"k": 2} if name == "kda" else {}
    mixer = ld.nn.Mixer(spec, 16, 4, head_dim=4, value_dim=6, consts=consts, heads=heads)
    x = torch.randn(2, 9, 16)
    parts = [mixer.shard(i, 2) for i in range(2)]
    torch.testing.assert_close(sum(p(x) for p in parts), mixer(x), rtol=1e-4, atol=1e-5)
    axes = mixer.head_axes()
    for (n, whole), (_, own) in zip(mixer.named_parameters(), parts[0].named_parameters(), strict=True):
        shape = list(whole.shape)
        if (axis := axes[n]) is not None:
            shape[axis] //= 2
        assert list(own.shape) == shape, n
    parts[1](x).sum().backward()
    assert all(p.grad is not None for p in parts[1].parameters())


@pytest.mark.parametrize("name", ["gated_delta_rule", "mamba3", "gsa"])
def test_packed_sequences_go_on_from_their_states(name: str) -> None:
    mixer = small_mixer(name)
    lengths = [(5, 4), (1, 1), (0, 3), (2, 0), (1, 6)]  # first call, second call
    wholes = [torch.randn(1, a + b, 16) for a, b in lengths]
    offsets = [torch.tensor([0, *n]).cumsum(0) for n in zip(*lengths, strict=True)]
    firsts = torch.cat([x[:, :a] for x, (a, _) in zip(wholes, lengths, strict=True)], dim=1)
    seconds = torch.cat([x[:, a:] for x, (a, _) in zip(wholes, lengths, strict=True)], dim=1)
    y, state = mixer(firsts, return_state=True, cu_seqlens=offsets[0])
    z, last = mixer(seconds, state, return_state=True, cu_seqlens=offsets[1])
    for i, x in enumerate(wholes):
        want, ended = mixer(x, return_state=True)
        found = torch.cat(
            [y[:, offsets[0][i] : offsets[0][i + 1]], z[:, offsets[1][i] : offsets[1][i + 1]]], 1
        )
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
        for tail, own in zip(last.tails.values(), ended.tails.values(), strict=True):
            torch.testing.assert_close(tail[i : i + 1], own)


def test_decode_steps_leave_an_old_state_alone_unless_told() -> None:
    mixer = small_mixer("gated_delta_rule")
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        _, state = mixer(x[:, :4], return_state=True)
        kept = state.memory[0].clone()
        first, _ = mixer(x[:, 4:], state, return_state=True)
        assert torch.equal(state.memory[0], kept)
        second, after = mixer(x[:, 4:], state, return_state=True, in_place=True)
    assert torch.equal(first, second)
    assert after.memory[0] is state.memory[0]
    assert not torch.equal(state.memory[0], kept)


def test_half_precision_keeps_gates_in_float32() -> None:
    mixer = small_mixer("kda").to(torch.bfloat16)
    x = torch.randn(2, 9, 16, dtype=torch.bfloat16)
    values, _ = mixer.make_inputs(x)
    assert values["g"].dtype == values["beta"].dtype == torch.float32
    assert values["k"].dtype == torch.bfloat16
    assert mixer(x).dtype == torch.bfloat16


def test_a_seed_gives_one_layer_and_the_device_is_kept() -> None:
    first, second = small_mixer("gdn2"), small_mixer("gdn2")
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    meta = small_mixer("gdn2", device="meta")
    assert all(p.is_meta for p in meta.parameters())
    assert [p.shape for p in meta.parameters()] == [p.shape for p in first.parameters()]
    assert small_mixer("gdn2", dtype=torch.float64).out.weight.dtype == torch.float64
    copy = pickle.loads(pickle.dumps(first))
    x = torch.randn(1, 5, 16)
    assert torch.equal(copy(x), first(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": {"w": 1}}, "heads names 'w'; the inputs are q, k, v, g, beta"),
        ({"heads": {"k": 3}}, "k has 3 heads, which does not divide num_heads 2"),
        ({"inputs": {"x": nn.Identity()}}, "inputs names 'x'"),
        ({"inputs": {"g": 3}}, "inputs\\['g'\\] must be callable, got int"),
        ({"consts": {"n": 2}}, "there is no const 'n'; its consts are scale"),
        ({"num_heads": 3}, "hidden_size 16 is no multiple of num_heads 3"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ],
)
def test_what_a_layer_does_not_take(options: dict[str, Any], message: str) -> None:
    given = {"num_heads": 2, **options}
    with pytest.raises(ArgumentError, match=message):
        ld.nn.Mixer("gated_delta_rule", 16, **given)


def test_wrong_calls_and_shards_say_so() -> None:
    mixer = small_mixer("gated_delta_rule")
    with pytest.raises(ArgumentError, match="x must be \\[B, T, 16\\], got shape \\(2, 3\\)"):
        mixer(torch.zeros(2, 3))
    with pytest.raises(ArgumentError, match="has 2 heads, which 4 ranks do not divide"):
        mixer.shard(0, 4)
    with pytest.raises(ArgumentError, match="replaced inputs \\(g\\) cannot be sharded"):
        small_mixer("gated_delta_rule", inputs={"g": nn.Linear(16, 2)}).shard(0, 2)
    with pytest.raises(ArgumentError, match="one number per head"):
        small_mixer("s4d").shard(0, 2)
