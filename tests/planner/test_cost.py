"""Counted costs against the formulas of the derivation."""

from __future__ import annotations

import pytest
from hand_written import CASES

from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.cost import Flops, decode_flops, flops, shared_nodes, state_bytes, traffic
from linalg_dsl.planner.plan import ChunkPlan

SHAPES = [(64, 128, 128), (32, 16, 48), (16, 96, 8)]


def plan_of(name: str) -> ChunkPlan:
    return derive(next(c for c in CASES if c.name == name).canonical)


@pytest.mark.parametrize(("C", "K", "V"), SHAPES)
@pytest.mark.parametrize("name", ["linear", "scalar_gate", "channel_gate"])
def test_without_erase(name: str, C: int, K: int, V: int) -> None:
    forward = plan_of(name)
    m = 1
    got = flops(forward, C, K, V)
    assert got.products == K * V * (2 + 2 * m) + 2 * C * m * K + 2 * C * m * V
    assert got.solves == 0
    reverse = flops(backward(forward), C, K, V, at_hand=forward)
    assert reverse.products == K * V * (4 + 4 * m) + 4 * m * C * K + 4 * m * C * V


def forward_by_t(m: int, r: int, C: int, K: int, V: int) -> float:
    rows = 2 * m * (1 + r) * K + 2 * m * (1 + m) * V
    return K * V * (2 + 2 * m + 2 * r) + C * rows + 2 * m * r * V + 2 * C * m * m * r


def forward_by_u(m: int, r: int, C: int, K: int, V: int) -> float:
    rows = 2 * m * (1 + r) * K + 2 * (m + m * r + r * r) * V
    return K * V * (2 + 2 * m + 2 * r) + C * rows + 2 * m * r * V + 2 * C * r * r * m


@pytest.mark.parametrize(("C", "K", "V"), SHAPES)
@pytest.mark.parametrize("name", ["delta", "gated_delta", "channel_delta", "erase_undecayed"])
def test_with_one_erase(name: str, C: int, K: int, V: int) -> None:
    forward = plan_of(name)
    m = r = 1
    got = flops(forward, C, K, V)
    assert got.products == forward_by_t(m, r, C, K, V)
    assert got.solves == C * C / 3
    reverse = flops(backward(forward), C, K, V)
    rows = 4 * m * (1 + r) * K + (4 * m + 2 * m * m + 4 * m * r) * V
    by_du = K * V * (4 + 4 * m + 4 * r) + C * rows + 4 * m * r * V
    recompute = 2 * r * K * V + C * (2 * m * (1 + r) * K + 2 * m * m * V) + 2 * m * r * V
    replay = 2 * m * K * V  # the state of the next chunk, where it is not saved
    forming_t = 2 * C * m * m * r
    d_sigma = 2 * m * r * V  # a row sum: elementwise here
    no_w = 2 * C * m * r * V  # W = Sigma Y: the solve is for U + Y, and no product with G stands outside it
    assert reverse.products == by_du + recompute + replay + forming_t - d_sigma - no_w


@pytest.mark.parametrize(("C", "K", "V"), SHAPES)
def test_the_smaller_system_is_taken_and_a_zero_row_costs_nothing(C: int, K: int, V: int) -> None:
    got = flops(plan_of("low_rank"), C, K, V)  # m = 2, r = 1, W_2 = 0, Sigma = (0, 1)
    zero_row, zero_sigma = 2 * C * V, 2 * V
    assert got.products == forward_by_u(2, 1, C, K, V) - zero_row - zero_sigma
    assert got.solves == C * C / 3


def test_the_example_of_the_derivation() -> None:
    forward = plan_of("gated_delta")
    assert round(flops(forward, 64, 128, 128).products, -3) == 164_000
    assert round(flops(forward, 64, 128, 128).solves, -2) == 1_400
    assert round(decode_flops(forward, 128, 128), -3) == 115_000


def test_traffic_of_the_example() -> None:
    forward = plan_of("gated_delta")
    K = V = 128
    moved = traffic(forward, 64, K, V, gates=frozenset({"g"}))
    assert moved.total == 2 * (2 * K + 2 * V + 1) + 4
    assert round(moved.total, -1) == 1030
    saved = traffic(forward, 64, K, V, gates=frozenset({"g"}), saves_states=True)
    assert saved.states == 4 * K * V / 64
    reverse = traffic(backward(forward), 64, K, V, gates=frozenset({"g"}), saves_states=True)
    assert reverse.total == 2 * (2 * 2 * K + 3 * V + 2) + 8 + 4 * K * V / 64


def test_nodes_are_recognised_across_plans() -> None:
    forward = plan_of("gated_delta")
    reverse = backward(forward)
    shared = set(shared_nodes(reverse, forward))
    late = {
        i for i, n in enumerate(reverse.nodes) if n.op in ("solve_t", "cotangent", "gate_sum", "span_sum")
    }
    assert late
    assert not late & shared
    assert {i for i, n in enumerate(reverse.nodes) if n.op in ("input", "solve", "pairs_decay")} <= shared
    assert shared_nodes(forward, forward) == {i: i for i in range(len(forward.nodes))}


def test_state_on_chip_and_sums() -> None:
    assert state_bytes(backward(plan_of("linear")), 128, 64) == 4 * 128 * 64
    assert Flops(1, 2, 3) + Flops(10, 20, 30) == Flops(11, 22, 33)
    assert Flops(1, 2, 3).total == 6
