"""Drawn inputs are ones that a recurrence can be computed with: states stay small, divisors do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from linalg_dsl import ops
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.catalogue import catalogue_names
from linalg_dsl.ops.divisors import divisors
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.reference import reference

FREE = {"iplr", "dplr", "mdn", "mdn_lagged"}
"""Erases along one key of what another looks up, of any angle: what these entries allow grows, a product of
many I + b aᵀ with independent unit a and b by e^(1/2K) a token, of momentum by more."""


@pytest.mark.parametrize("gates", ["mild", "slow"])
@pytest.mark.parametrize("name", catalogue_names())
def test_states_of_drawn_inputs_last(name: str, gates: GateKind) -> None:
    """300 tokens grow by less than a thousand: so 2000, which float32 is to hold, by less than 1e20."""
    spec = getattr(ops, name).spec
    tensors = draw(spec, 1, 300, 2, 16, 4, gates=gates, seed=3)
    sizes = []
    with torch.no_grad():
        for length in (30, 300):
            some = {d.name: tensors[d.name][:, :length] if d.timed else tensors[d.name] for d in spec.inputs}
            _, last = reference(spec, some, output_final_state=True)
            carried = [last] if isinstance(last, Tensor) else list(last)
            sizes.append(max(float(x.abs().max()) for x in carried))
    assert sizes[1] < (1e30 if name in FREE else 1e3 * max(sizes[0], 1.0))


OWN = """
recurrence shares
input q, k : [K]
input v : [V]
input f : gate in (0, 1)
state S : [K, V]
state n : [K]
S_t = f_t S_{t-1} + k_t v_tᵀ
n_t = f_t n_{t-1} + k_t
o_t = S_tᵀ q_t / (n_tᵀ q_t)
"""


def test_what_is_divided_by_is_drawn_off_zero() -> None:
    """Quotients of drawn features are averages of v: no larger than it, with its digits."""
    spec = parse(OWN)
    tensors = draw(spec, 2, 40, 2, 6, 5, seed=1)
    states = draw_state(spec, 2, 2, 6, 5, seed=1)
    assert (states[1] > 0).all()
    assert (states[0] < 0).any()
    o, _ = reference(spec, tensors)
    assert float(o.abs().max()) <= float(tensors["v"].abs().max())
    rounded = {n: x.float() for n, x in tensors.items()}
    short, _ = reference(spec, rounded, dtype=torch.float32)
    assert float((short - o).norm()) < 1e-6 * float(o.norm())


@pytest.mark.parametrize(
    ("name", "states", "inputs"),
    [
        ("based", {"n"}, {"q", "k"}),  # features are the caller's
        ("rebased", {"n"}, set()),  # made positive by the entry
        ("mlstm", set(), set()),  # the larger of two numbers, one of them positive
        ("kalman", {"lam"}, set()),  # kᵀ diag(...) k is positive for any k
        ("gated_delta_rule", set(), set()),
    ],
)
def test_what_is_divided_by_is_found(name: str, states: set[str], inputs: set[str]) -> None:
    found = divisors(getattr(ops, name).spec)
    assert (set(found.states), set(found.inputs)) == (states, inputs)


def test_features_divided_by_keep_their_digits_in_short_types() -> None:
    report = ops.based.op(backend="torch").check(B=1, T=100, H=1, K=64, V=8, dtype=torch.bfloat16)
    assert report.ok, str(report)
