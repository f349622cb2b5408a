from __future__ import annotations

import pytest
import torch
from recurrences import ALL

from linalg_dsl.algebra.expr import SCALAR, Symbol, outer, transpose
from linalg_dsl.errors import InternalError
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.evaluate_form import run_form
from linalg_dsl.planner.evaluate_tokens import evaluate


@pytest.mark.parametrize("name", ["rwkv6", "dplr", "rows_delta", "retnet"])
def test_empty_and_single_token_sequences(name: str) -> None:
    spec = parse(ALL[name].text(name))
    for length in (0, 1):
        tensors = draw(spec, B=2, T=length, H=2, K=1, V=1, dtype=torch.float64, seed=0)
        o, last = run_form(canonicalise(spec), tensors)
        expected, end = reference(spec, tensors, output_final_state=True)
        assert o.shape == expected.shape
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(last, end)


def test_resets_forget_the_past() -> None:
    spec = parse(ALL["gla"].text("gla"))
    tensors = draw(spec, B=1, T=6, H=1, K=4, V=3, dtype=torch.float64, seed=0)
    tensors["h"][:, 3] = -torch.inf
    whole, _ = run_form(canonicalise(spec), tensors)
    tail, _ = run_form(canonicalise(spec), {n: x[:, 3:] for n, x in tensors.items()})
    assert whole.isfinite().all()
    torch.testing.assert_close(whole[:, 3:], tail)


def test_run_time_consts_are_taken_as_given_or_as_declared() -> None:
    spec = parse(ALL["simple_gla"].text("gla"))
    canonical = canonicalise(spec)
    tensors = draw(spec, B=1, T=5, H=1, K=4, V=3, dtype=torch.float64, seed=0)
    declared, _ = run_form(canonical, tensors)
    given, _ = run_form(canonical, tensors, consts={"scale": 2.0})
    torch.testing.assert_close(declared * 4, given)  # 1 / sqrt(4) is 1/2


def test_the_form_is_differentiable() -> None:
    spec = parse(ALL["gated_delta_rule"].text("gdn"))
    tensors = draw(spec, B=1, T=4, H=1, K=2, V=2, dtype=torch.float64, seed=0)
    for x in tensors.values():
        x.requires_grad_()
    o, last = run_form(canonicalise(spec), tensors)
    expected, end = reference(spec, tensors, output_final_state=True)
    assert end is not None
    found = torch.autograd.grad((o.sum() + last.sum()), list(tensors.values()))
    wanted = torch.autograd.grad((expected.sum() + end.sum()), list(tensors.values()))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_what_is_not_in_normal_form_is_a_fault() -> None:
    k, v = Symbol("k", ("K", 1)), Symbol("v", ("V", 1))
    with pytest.raises(InternalError):
        evaluate(transpose(k), lambda _: torch.ones(3))
    with pytest.raises(InternalError):
        evaluate(outer(k, v), lambda _: torch.ones(3))
    assert evaluate(Symbol("x", SCALAR), lambda _: torch.tensor(2.0)).item() == 2.0


def test_a_number_beside_a_column_has_no_device_of_its_own() -> None:
    spec = parse(
        "recurrence r\ninput a : [K]\ninput k : [K]\ninput v : [V]\ninput q : [K]\n"
        "S_t = S_{t-1} + k_t v_t^T\no_t = S_t^T ((1 + a_t) .* q_t)\n"
    )
    tensors = {i.name: torch.empty(1, 2, 1, 4, device="meta") for i in spec.inputs}
    o, _ = run_form(canonicalise(spec), tensors)
    assert o.device.type == "meta"
