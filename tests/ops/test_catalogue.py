"""Every entry says what its paper says, is right, and is a function of linalg_dsl.ops."""

from __future__ import annotations

import inspect
import math
import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops import catalogue_names
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference

K, V = 5, 4
Named = dict[str, Tensor]
Update = Callable[[Tensor, Named], Tensor]
Read = Callable[[Tensor, Tensor, Named], Tensor]


def inclusive(S: Tensor, before: Tensor, x: Named) -> Tensor:
    return S.T @ x["q"]


def write(x: Named) -> Tensor:
    return torch.outer(x["k"], x["v"])


def delta(S: Tensor, x: Named) -> Tensor:
    """S, already decayed, with what stands under k moved towards v by beta."""
    return S + x["beta"] * torch.outer(x["k"], x["v"] - x["k"] @ S)


def rows(a: Tensor, S: Tensor) -> Tensor:
    return a[:, None] * S


# update and read of one token of one head, written as in the papers, without the scale
PAPERS: dict[str, tuple[Update, Read]] = {
    "linear_attention": (lambda S, x: S + write(x), inclusive),
    "retnet": (lambda S, x: x["gamma"] * S + write(x), inclusive),
    "simple_gla": (lambda S, x: x["g"].exp() * S + write(x), inclusive),
    "sigmoid_gla": (lambda S, x: torch.sigmoid(x["a"]) ** (1 / 16) * S + write(x), inclusive),
    "gla": (lambda S, x: rows(x["g"].exp(), S) + write(x), inclusive),
    "hgrn2": (lambda S, x: rows(x["f"], S) + torch.outer(1 - x["f"], x["v"]), inclusive),
    "rwkv6": (
        lambda S, x: rows(x["w"].exp(), S) + write(x),
        lambda S, before, x: before.T @ x["r"] + (x["r"] * x["u"] * x["k"]).sum() * x["v"],
    ),
    "delta_rule": (delta, inclusive),
    "gated_delta_rule": (lambda S, x: delta(x["g"].exp() * S, x), inclusive),
    "comba": (
        lambda S, x: x["g"].exp() * S + x["beta"] * torch.outer(x["k"], x["v"] - x["p"] @ S),
        lambda S, before, x: S.T @ (x["q"] - x["d"] * x["k"]),
    ),
    "kda": (lambda S, x: delta(rows(x["g"].exp(), S), x), inclusive),
    "gdn2": (
        lambda S, x: (
            rows(x["g"].exp(), S)
            + torch.outer(x["k"], x["w"] * x["v"] - (x["b"] * x["k"]) @ rows(x["g"].exp(), S))
        ),
        inclusive,
    ),
    "iplr": (lambda S, x: S + torch.outer(x["b"], x["a"] @ S) + write(x), inclusive),
    "dplr": (lambda S, x: rows(x["g"].exp(), S) + torch.outer(x["b"], x["a"] @ S) + write(x), inclusive),
}


def spec_of(name: str) -> RecurrenceSpec:
    return parse(catalogue_text(name), f"{name}.rec")


def test_every_entry_is_compared_with_its_paper() -> None:
    assert set(PAPERS) == set(catalogue_names())


@pytest.mark.parametrize("name", catalogue_names())
def test_an_entry_has_the_name_of_its_file_and_names_its_source(name: str) -> None:
    spec = spec_of(name)
    assert spec.name == name
    assert re.search(r"arXiv \d{4}\.\d{5}", spec.doc)


@pytest.mark.parametrize("name", catalogue_names())
def test_an_entry_is_what_the_paper_says(name: str) -> None:
    spec = spec_of(name)
    update, read = PAPERS[name]
    x = draw(spec, 1, 6, 1, K, V, seed=2)
    S = torch.zeros(K, V, dtype=torch.float64)
    expected = []
    for t in range(6):
        at = {i.name: x[i.name][0, t, 0] if i.timed else x[i.name][0] for i in spec.inputs}
        before, S = S, update(S, at)
        expected.append(read(S, before, at) / math.sqrt(K))
    o, final = reference(spec, x, output_final_state=True)
    torch.testing.assert_close(o[0, :, 0], torch.stack(expected))
    assert isinstance(final, Tensor)
    torch.testing.assert_close(final[0, 0], S)


@pytest.mark.parametrize("gates", ["mild", "resets"])
@pytest.mark.parametrize("name", catalogue_names())
def test_the_compiled_entry_agrees_with_the_step_loop_in_every_gradient(name: str, gates: str) -> None:
    function = getattr(ops, name)
    x = draw(function.spec, 2, 35, 2, K, V, gates=gates, seed=1)  # type: ignore[arg-type]
    leaves = {n: z.requires_grad_() for n, z in x.items()}
    start = torch.randn(2, 2, K, V, dtype=torch.float64, requires_grad=True)
    o, state = function(**leaves, initial_state=start, output_final_state=True, backend="torch")
    want_o, want_state = reference(function.spec, leaves, initial_state=start, output_final_state=True)
    assert isinstance(want_state, Tensor)
    torch.testing.assert_close(o, want_o)
    torch.testing.assert_close(state, want_state)
    wanted = [*leaves.values(), start]
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    got = torch.autograd.grad([o, state], wanted, [d_o, d_state])
    want = torch.autograd.grad([want_o, want_state], wanted, [d_o, d_state])
    for label, a, b in zip([*leaves, "initial_state"], got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10), f"d_{label}: {a - b}"


def test_reductions_between_entries() -> None:
    """What one entry becomes at special gates is another one, to rounding."""
    x = draw(spec_of("gdn2"), 1, 40, 2, K, V, seed=4)
    q, k, v = x["q"], x["k"], x["v"]
    beta = torch.rand(1, 40, 2, dtype=torch.float64)
    g = -torch.rand(1, 40, 2, dtype=torch.float64)
    wide = g[..., None].expand(1, 40, 2, K)
    zero, one = torch.zeros_like(q), torch.ones_like(v)
    per_key = beta[..., None].expand_as(q)
    gated = ops.gated_delta_rule(q, k, v, g, beta)
    close = torch.testing.assert_close
    close(ops.kda(q, k, v, wide, beta), gated)
    close(ops.gdn2(q, k, v, x["g"], per_key, one * beta[..., None]), ops.kda(q, k, v, x["g"], beta))
    close(ops.gdn2(q, k, v, x["g"], zero, one), ops.gla(q, k, v, x["g"]))
    close(ops.gated_delta_rule(q, k, v, 0 * g, beta), ops.delta_rule(q, k, v, beta))
    close(ops.gla(q, k, v, wide), ops.simple_gla(q, k, v, g))
    close(ops.dplr(q, k, v, k, zero, wide), ops.simple_gla(q, k, v, g))
    decayed = g.exp()[..., None] * k
    close(ops.comba(q, k, decayed, v, g, beta, torch.zeros(2, dtype=torch.float64)), gated)
    raw = torch.randn(1, 40, 2, dtype=torch.float64)
    log_gate = torch.nn.functional.logsigmoid(raw) / 16
    close(ops.sigmoid_gla(q, k, v, raw), ops.simple_gla(q, k, v, log_gate))
    close(ops.iplr(q, k, v, -k, k), ops.dplr(q, k, v, -k, k, 0 * wide))


def test_from_line_to_both_modules_in_seconds() -> None:
    linalg_dsl.compile(ops.kda.spec).source(backend="triton")  # pays for the imports
    for name in catalogue_names():
        began = time.process_time()
        op = linalg_dsl.compile(catalogue_text(name))
        assert "def backward(" in op.source("backward", backend="triton")
        assert "def backward(" in op.source("backward", backend="torch")
        assert time.process_time() - began < 2, name


def test_a_const_can_be_given_in_the_call() -> None:
    x: dict[str, Any] = {**draw(spec_of("sigmoid_gla"), 1, 20, 1, K, V)}
    o = ops.sigmoid_gla(**x, tau=4.0, scale=1.0)
    gate = torch.nn.functional.logsigmoid(x["a"]) / 4
    torch.testing.assert_close(o, ops.simple_gla(x["q"], x["k"], x["v"], gate, scale=1.0))


def test_the_function_documents_itself() -> None:
    function = ops.rwkv6
    assert list(inspect.signature(function).parameters)[:5] == ["r", "k", "v", "w", "u"]
    doc = inspect.getdoc(function)
    assert doc is not None
    assert "arXiv 2404.05892" in doc
    assert "w: [B, T, H, K], log decay" in doc
    assert "u: [H, K]" in doc
    assert "S_t = diag(exp(w_t)) S_{t-1} + k_t v_tᵀ" in doc


def test_a_function_is_made_once_and_survives_pickling() -> None:
    assert ops.gla is ops.gla
    assert pickle.loads(pickle.dumps(ops.gla)) is ops.gla
    assert ops.gla.op() is ops.gla.op()
    assert isinstance(ops.gla.op(), type(linalg_dsl.compile(ops.gla.spec)))


def test_names_outside_the_catalogue() -> None:
    assert not hasattr(ops, "gated_delta_rules")
    assert set(catalogue_names()) < set(dir(ops))
    with pytest.raises(ArgumentError, match="did you mean gated_delta_rule"):
        catalogue_text("gated_delta_rules")
    with pytest.raises(ArgumentError, match=re.escape("no recurrence '../../setup'")):
        catalogue_text("../../setup")
