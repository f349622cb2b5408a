"""The kernels of known classes: which walks, what they own, what goes through memory between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import TEXTS

import linalg_dsl as ld
from linalg_dsl.codegen.schedule.boundary import with_boundaries
from linalg_dsl.codegen.schedule.call_shape import CallShape
from linalg_dsl.codegen.schedule.cut import cut
from linalg_dsl.codegen.schedule.describe import kernel_schedule, schedule_lines
from linalg_dsl.codegen.schedule.kernel_plan import Kernel, KernelPlan
from linalg_dsl.codegen.schedule.lower import lower
from linalg_dsl.codegen.schedule.naming import with_names
from linalg_dsl.codegen.targets import TARGETS
from linalg_dsl.errors import ArgumentError

Walk = tuple[str, str | None, str | None]
FORWARD: Walk = ("walk", "forward", "V")
NO_ERASE = [("walk", "forward", "K"), ("walk", "reverse", "V"), ("walk", "reverse", "K")]
WITH_ERASE = [("walk", "reverse", "V"), ("walk", "forward", "K"), ("walk", "reverse", "K")]
PREP: Walk = ("prep", None, None)


def plan_of(name: str) -> KernelPlan:
    return ld.compile(TEXTS[name]).plan.kernels


def shape_of(kernels: tuple[Kernel, ...]) -> list[Walk]:
    return [(k.family, k.direction, k.split) for k in kernels]


def ops(plan: KernelPlan, nodes: tuple[int, ...]) -> list[str]:
    return [plan.plan.nodes[n].op for n in nodes]


def labels(plan: KernelPlan, nodes: tuple[int, ...]) -> set[str]:
    names = {n: name for name, n in plan.results}
    return {names.get(n) or plan.plan.nodes[n].label for n in nodes}


def test_linear_attention_is_four_walks_and_nothing_between() -> None:
    plan = plan_of("linear_attention")
    assert shape_of(plan.forward) == [FORWARD]
    assert shape_of(plan.backward) == NO_ERASE
    assert plan.buffers == ()
    assert [labels(plan, k.stores) for k in (*plan.forward, *plan.backward)] == [
        {"o"}, {"d_q"}, {"d_v"}, {"d_k"}
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda", "dplr", "gated_rank_two"])
def test_erases_take_the_walks_in_the_order_of_what_each_needs(name: str) -> None:
    """dU needs dS alone; the K-split walks take U and dU as given."""
    plan = plan_of(name)
    assert shape_of(plan.forward) == [PREP, FORWARD]
    between = [] if "decay_adjoints" in ops(plan, plan.backward[-1].body) else [PREP]
    assert shape_of(plan.backward) == [WITH_ERASE[0], *between, *WITH_ERASE[1:], PREP]
    assert "ut_transform" in ops(plan, plan.forward[0].body)
    later = plan.backward[1:]
    assert all("ut_transform" not in ops(plan, k.body) for k in plan.backward)
    walks = [k for k in later if k.family == "walk"]
    assert all({"u_1", "d_u_1"} & labels(plan, k.loads) for k in walks)
    for walk in walks:  # their state needs no solve: no transformed row is formed there
        assert "apply" not in ops(plan, tuple(n for n in walk.body if "V" in plan.plan.nodes[n].axes))


@pytest.mark.parametrize("name", ["gla", "kda", "rwkv6", "dplr"])
def test_decays_per_channel_scale_tiles_in_a_prep(name: str) -> None:
    """A walk reads k and q with their decays, and forms no exponential."""
    plan = plan_of(name)
    prep, walk = plan.forward
    decays = {"from_start", "to_end", "total", "decayed_scores", "pairs_decay"}
    assert decays & set(ops(plan, prep.body))
    for kernel in (walk, *plan.backward[:3]):
        assert kernel.family == "walk"
        assert not decays & set(ops(plan, kernel.body))
    stored = [plan.plan.nodes[n] for n in prep.stores]
    scaled = [n for n in stored if n.axes == ("t", "K")]
    assert len(scaled) >= 2
    for node in scaled:
        assert node.op == "mul"
        assert {plan.plan.nodes[a].op for a in node.args} & {"from_start", "to_end"}
    assert "decay_adjoints" in ops(plan, plan.backward[-1].body)


@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule", "retnet"])
def test_a_scalar_decay_is_stored_as_factors_not_as_scaled_tiles(name: str) -> None:
    plan = plan_of(name)
    wide = [b for b in plan.buffers if b.saved and b.axes == ("t", "K")]
    assert not wide


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_states_stay_on_chip_and_every_gradient_has_one_place(name: str) -> None:
    plan = plan_of(name)
    stored = [n for k in (*plan.forward, *plan.backward) for n in k.stores]
    assert len(stored) == len(set(stored))
    assert all(plan.plan.nodes[n].axes != ("K", "V") for n in stored)
    assert {n for _, n in plan.results} <= set(stored)


@pytest.mark.parametrize("name", ["linear_attention", "gated_delta_rule"])
def test_a_forward_without_gradients_saves_nothing(name: str) -> None:
    plan = ld.compile(TEXTS[name]).plan
    alone = cut(lower(plan.forward, None))
    assert alone.backward == ()
    assert not any(b.saved or b.only_saved for b in alone.buffers)
    assert shape_of(alone.forward) == shape_of(plan.kernels.forward)


def test_equal_gradients_of_two_inputs_are_stored_once() -> None:
    plan = ld.compile(
        "recurrence r\ninput q, k : [K]\ninput v, w : [V]\nS_t = S_{t-1} + k_t (v_t + w_t)ᵀ\no_t = S_tᵀ q_t\n"
    ).plan.kernels
    results = dict(plan.results)
    assert results["d_v"] == results["d_w"]
    assert sum(k.stores.count(results["d_v"]) for k in plan.backward) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kda", {"k_since_start", "q_since_start", "k_until_end", "decay_chunk", "d_k_until_end"}),
        ("rwkv6", {"r_to_previous", "k_until_end", "d_r_to_previous"}),
        ("gated_delta_rule", {"since_start", "until_end", "u_1", "d_u_1", "d_a_q11", "d_a_b11"}),
        ("delta_rule", {"d_k_by_s", "d_g_b11"}),
    ],
)
def test_buffers_are_named_after_what_they_hold(name: str, expected: set[str]) -> None:
    plan = plan_of(name)
    assert expected <= {b.name for b in plan.buffers}


@pytest.mark.parametrize("name", ["simple_gla", "delta_rule", "gated_delta_rule", "comba"])
def test_gradients_are_finished_in_the_walks(name: str) -> None:
    """Without a decay per channel the last kernel reads rows for a param's gradient only."""
    plan = plan_of(name)
    last = plan.backward[-1]
    rows = {n for n in last.loads if len(plan.plan.nodes[n].axes) == 2 and "s" not in plan.plan.nodes[n].axes}
    assert bool(rows) == (name == "comba")
    shared = {b.node for b in plan.buffers if b.shares}
    assert shared
    assert shared <= set(last.loads)


def test_names_change_no_value() -> None:
    plan = ld.compile(TEXTS["kda"]).plan
    lowered, _ = with_boundaries(lower(plan.forward, plan.backward))
    named = with_names(lowered)
    assert named == lowered
    assert all(n.label == m.label for n, m in zip(lowered.nodes, named.nodes, strict=True) if n.label)
    assert [n.label for n in named.nodes] != [n.label for n in lowered.nodes]


def test_the_same_recurrence_gives_the_same_plan() -> None:
    assert plan_of("kda") == plan_of("kda")
    assert plan_of("kda") != plan_of("gla")


# -- in words -------------------------------------------------------------------------------------------
def test_the_launches_in_words_name_kernels_sizes_and_reasons() -> None:
    plan = plan_of("gated_delta_rule")
    text = "\n".join(schedule_lines(plan, B=8, T=2048, H=16, K=128, V=128))
    assert "chunks of 32 tokens: an erase" in text
    assert "fwd_walk: forward walk, V split, 256 programs (sequences × heads × 2 blocks of 64)" in text
    assert "forward: 2 launches" in text
    assert "backward: 5 launches" in text
    assert "V is split: products with S sum over K" in text
    assert "with d_u_1, u_1 at hand its state is a plain linear recurrence" in text
    assert "exactly at every chunk: all states take 268 MB" in text
    longer = "\n".join(schedule_lines(plan, B=8, T=16384, H=16, K=128, V=128))
    assert "exactly at every 8th chunk" in longer
    assert all(k.name in text for k in (*plan.forward, *plan.backward))
    # 5 [t, s] of 32 columns in bfloat16 (T, and two scores with and without their decays),
    # u in bfloat16, 2 [t] and 1 number a chunk in float32, per head
    saved = 8 * 2048 * 16 * (5 * 32 * 2 + 128 * 2 + 2 * 4 + 4 / 32) / 1e6
    assert f"saved for the backward beside its inputs: {saved:,.0f} MB" in text


def test_sizes_change_the_reasons() -> None:
    plan = plan_of("gated_delta_rule")
    few = "\n".join(schedule_lines(plan, B=1, T=200, H=2, K=128, V=128))
    assert "blocks of 16, for 16 programs on 132 multiprocessors" in few
    wide = "\n".join(schedule_lines(plan, B=8, T=2048, H=16, K=128, V=16, dtype="float32"))
    assert "one block: a program holds all 16" in wide
    assert (
        "chunks of 32 tokens: an erase (its solve grows with the square); products take operands of 4" in wide
    )
    plain = plan_of("linear_attention")
    assert "so a large one costs little" in schedule_lines(plain, B=1, T=9, H=1, K=128, V=128)[1]
    assert "tiles of [chunk, 256]" in schedule_lines(plain, B=1, T=9, H=1, K=128, V=256)[1]
    asked = schedule_lines(plan, B=1, T=200, H=2, K=64, V=64, chunk_size=128)
    assert asked[1] == "chunks of 128 tokens: as asked for"
    with pytest.raises(ArgumentError, match="expected one of bfloat16, float16, float32, got 'int8'"):
        schedule_lines(plan, B=1, T=1, H=1, K=1, V=1, dtype="int8")
    with pytest.raises(ArgumentError, match="sm_90"):
        schedule_lines(plan, B=1, T=1, H=1, K=1, V=1, target="sm_1")


def test_explanations_of_a_shape_quote_the_launches() -> None:
    plan = ld.compile(TEXTS["simple_gla"]).plan
    assert "multiprocessors" not in str(plan.explain())
    assert "on gfx942, 304 multiprocessors" in "\n".join(plan.explain(2, 300, 3, target="gfx942").schedule)


LAUNCHED = """
import json, sys
from kernel_cases import TEXTS
import linalg_dsl as ld
from linalg_dsl.codegen.targets import TARGETS, launches
out = []
for name, target, dtype, batch, length, heads, key, value in json.loads(sys.argv[1]):
    text = ld.compile(TEXTS[name], schedule="walk").source(backend="triton")
    found = launches(text, TARGETS[target], key=key, value=value, dtype=dtype, batch=batch,
                     length=length, heads=heads)
    names = ("C", "BLOCK", "KB")
    sizes = [[dict(x.constants).get(n) for n in names] for x in found]
    out.append([[x.kernel.__name__, x.warps, x.stages, *more] for x, more in zip(found, sizes, strict=True)])
print(json.dumps(out))
"""


CALLS: list[tuple[str, str, int, int, int, int, int]] = [
    ("sm_90", "bfloat16", 8, 2048, 16, 128, 128),
    ("sm_86", "bfloat16", 1, 100, 2, 64, 256),
    ("gfx942", "float32", 2, 1000, 3, 100, 60),
]


def test_the_described_sizes_are_those_that_the_launcher_takes() -> None:
    pytest.importorskip("triton")
    cases = [(name, *call) for name in ("linear_attention", "gla", "delta_rule", "kda") for call in CALLS]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", LAUNCHED, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    for case, launched in zip(cases, json.loads(done.stdout), strict=True):
        name, target, dtype, batch, length, heads, key, value = case
        plan = plan_of(name)
        chunk = launched[0][3]
        assert f"chunks of {chunk} tokens" in "\n".join(
            schedule_lines(plan, B=batch, T=length, H=heads, K=key, V=value, dtype=dtype, target=target)
        )
        shape = CallShape(batch, length, heads, key, value, dtype, chunk)
        kernels = [*plan.forward, *plan.backward]
        assert [x[0] for x in launched] == [f"{plan.plan.name}_{k.name}" for k in kernels]
        for kernel, (_, warps, stages, _, block, wide) in zip(kernels, launched, strict=True):
            found = kernel_schedule(plan, kernel, shape, TARGETS[target])
            assert (found.warps, found.stages) == (warps, stages), (case, kernel.name)
            if kernel.family == "walk":
                assert found.block == block, (case, kernel.name)
            elif wide is not None:
                assert min(found.block, key) == wide, (case, kernel.name)
