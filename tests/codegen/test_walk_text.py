"""What the text of kernels owes to the hardware: loads that run ahead, few sums to hand over, short lives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from kernel_cases import TEXTS

import linalg_dsl as ld
from linalg_dsl.codegen.emit.kernel_lines import looking_always, through_products
from linalg_dsl.codegen.schedule.kernel_plan import Kernel, KernelPlan, tile_kinds
from linalg_dsl.codegen.schedule.table import choose_walk
from linalg_dsl.codegen.schedule.traces import leaves_trace
from linalg_dsl.ops.draw import draw

SHARED = 232448


def plan_of(name: str) -> KernelPlan:
    return ld.compile(TEXTS[name]).plan.kernels


def kernel_of(plan: KernelPlan, name: str) -> Kernel:
    (found,) = (k for k in (*plan.forward, *plan.backward) if k.name == name)
    return found


def text_of(name: str) -> str:
    return ld.compile(getattr(ld.ops, name).spec, backend="triton").source(backend="triton")


def kernel_text(name: str, kernel: str) -> str:
    text = ld.compile(TEXTS[name]).source(backend="triton")
    found = re.search(rf"^def {name}_{kernel}\(.*?(?=^@triton|^def launch)", text, re.M | re.S)
    assert found is not None
    return found.group()


def test_only_tiles_that_no_product_takes_come_by_one() -> None:
    lines = ["b_y = tl.dot(b_k.to(DOT), b_s)", "b_x = b_k.to(tl.float32) + b_v.to(tl.float32)"]
    rows = through_products(lines, ["b_k", "b_v"], [])
    assert rows == [lines[0], "b_x = b_k.to(tl.float32) + widened(b_v, b_one, DOT, ROWS=True)"]
    assert "widened(b_v, b_one, DOT, ROWS=False)" in through_products(lines, [], ["b_v"])[1]


def test_a_tile_that_comes_by_one_is_looked_at_where_all_its_uses_see_it() -> None:
    lines = [
        "b_v = tl.load(p_v)",
        "if SAVE:",
        "    b_y = b_v.to(tl.float32)",
        "b_x = b_v.to(tl.float32) + b_b_v.to(tl.float32)",
    ]
    assert through_products(lines, [], ["b_v"], {"b_v": ("b_v_wide", "tl.load(p_v)")}) == [
        "b_v = tl.load(p_v)",
        "b_v_wide = widened(b_v, b_one, DOT, ROWS=False)",
        "if has_spread(b_v_wide, b_v, C, DOT, ROWS=False, LOOK=LOOK):",
        "    b_v_wide = tl.load(p_v).to(tl.float32)",
        "if SAVE:",
        "    b_y = b_v_wide",
        "b_x = b_v_wide + b_b_v.to(tl.float32)",
    ]


@pytest.mark.parametrize(("name", "tile"), [("gated_delta_rule", "b_v"), ("delta_rule", "b_v")])
def test_the_forward_walk_takes_values_ahead(name: str, tile: str) -> None:
    text = kernel_text(name, "fwd_walk")
    assert f"widened({tile}, b_one, DOT, ROWS=False)" in text
    assert f"{tile}.to(tl.float32)" not in text
    before, loop = text.split("for i_step in", 1)
    assert "b_one = " in before
    assert "widened(b_k" not in loop  # a product takes the keys


def test_numbers_of_tokens_are_read_without_strides() -> None:
    text = kernel_text("gated_delta_rule", "fwd_walk")
    assert "b_since_start = tl.load(p_since_start + (i_ch * H + i_h) * C + o_t)" in text
    stored = kernel_text("gated_delta_rule", "fwd_prep")
    assert "(i_ch * H + i_h) * C + o_t, tl.where(m_t, b_since_start, 0.0)" in stored


def test_a_walk_hands_over_one_sum_where_two_are_added() -> None:
    plan = plan_of("gated_delta_rule")
    walk = kernel_of(plan, "bwd_forward_k")
    assert sum(plan.plan.nodes[n].op == "sum" for n in walk.stores) == 1


@pytest.mark.parametrize("name", ["gated_delta_rule", "simple_gla", "comba"])
def test_sums_over_scores_are_made_where_their_gradients_are(name: str) -> None:
    plan = plan_of(name)
    last = kernel_of(plan, "bwd_gradients")
    assert all(plan.plan.nodes[n].axes != ("t", "s") for n in last.loads)
    prep = kernel_of(plan, "bwd_prep")
    assert any(plan.plan.nodes[n].op == "span_sum" for n in prep.stores)


def test_decays_of_pairs_are_not_saved() -> None:
    plan = plan_of("gated_delta_rule")
    assert all(plan.plan.nodes[b.node].op != "pairs_decay" for b in plan.buffers)


def test_scores_are_stored_before_the_triangular_system_is_solved() -> None:
    text = kernel_text("gated_delta_rule", "fwd_prep")
    assert text.index("tl.store(p_g_q11") < text.index("for level in range(1, LEVELS)")
    assert text.index("for i_k in range(K_BLOCKS)") < text.index("b_since_start = ")


def test_states_kept_for_another_walk_are_as_short_as_operands() -> None:
    assert "b_s.to(p_marks_2.dtype.element_ty)" in kernel_text("gated_delta_rule", "bwd_forward_k")
    plan = plan_of("gated_delta_rule")
    kept = [
        tile_kinds(plan.plan.nodes, kernel_of(plan, f"bwd_{walk}")) for walk in ("forward_k", "reverse_k")
    ]
    assert ("OB" in kept[0], "ob" in kept[0]) == (True, False)
    assert ("OB" in kept[1], "ob" in kept[1]) == (False, True)


def test_stages_count_the_buffers_of_every_tile() -> None:
    """Three buffers of each tile fit beside one kept state, not beside two programs' worth of wide ones."""
    loads = ("tb", "tb", "to", "to", "ts")
    assert choose_walk(loads, 128, 128, 64, 2, SHARED, 128, 132) == (128, 8, 3)
    assert choose_walk(("OB", *loads), 128, 128, 64, 2, SHARED, 128, 132)[2] == 2
    for kinds in (loads, ("OB", *loads), ("ob", *loads)):
        block, _, stages = choose_walk(kinds, 128, 128, 64, 2, SHARED, 128, 132)
        sizes = {"t": 64, "s": 64, "o": 128, "b": block}
        tiles = [sizes[a[0]] * sizes[a[1]] for a in kinds if "t" in a]
        assert 2 * stages * sum(tiles) <= SHARED
    # numbers per token have buffers too: with five of them three stages were 8 bytes more than there are
    assert choose_walk(("t", *loads), 128, 128, 64, 2, SHARED, 128, 132)[2] == 3
    assert choose_walk(("t",) * 5 + loads, 128, 128, 64, 2, SHARED, 128, 132)[2] == 2


def test_all_factors_of_a_token_leave_the_operand() -> None:
    """mLSTM's read q / max(|n|, 1) scaled by its decay: q goes into products as it was loaded."""
    op = ld.compile(ld.ops.mlstm.spec)
    (text,) = (m.text for m in op.modules("triton") if m.name == "mlstm_C")
    for walk in ("fwd_walk", "bwd_reverse_v"):
        kernel = text.split(f"def mlstm_C_{walk}(")[1].split("@triton.jit")[0]
        assert "b_q.to(DOT)" in kernel
        assert "widened(b_q" not in kernel


def test_blocks_leave_room_to_turn_results_of_products_below_sm_90() -> None:
    """On sm_86 one wide program with three stages does not fit: 118 of 99 KB; on sm_90 there is room."""
    loads = ("to", "to", "tb", "ts", "ts")
    assert choose_walk(loads, 128, 128, 32, 2, 99 * 1024, 128, 84)[0] == 32
    for lanes in (32, 128):
        block, _, stages = choose_walk(loads, 128, 128, 32, 2, 99 * 1024, lanes, 84)
        tiles = 2 * 32 * 128 + 32 * block + 2 * 32 * 32
        assert 2 * stages * tiles + 8 * 32 * block <= 99 * 1024


def test_below_sm_90_wide_blocks_have_two_stages() -> None:
    """With one, tiles go through registers: without the look delta_rule spilled 216 bytes, retnet 72."""
    for chunk, shared, units in ((64, 163 * 1024, 108), (64, 99 * 1024, 84), (32, 99 * 1024, 84)):
        for loads in (("to", "to", "tb"), ("to", "to", "tb", "ts", "ts")):
            block, warps, stages = choose_walk(loads, 128, 128, chunk, 2, shared, 128, units)
            assert stages > 1 or block == 32
            assert warps == (8 if chunk == 64 else 4)


@pytest.mark.parametrize(
    ("major", "key", "look"),
    [(8, 64, "always"), (9, 128, "rows"), (9, 256, "products"), (10, 256, "flat"), (0, 256, "rows")],
)
def test_the_look_for_nan_is_chosen_by_target_and_size(
    major: int, key: int, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_90 beside rows of 256 it spilled bytes: delta_rule 2400, kda 608, gated_delta_rule 88."""
    op = ld.compile(TEXTS["gated_delta_rule"], backend="triton")
    text, module = op.module_text("triton"), op.operator("triton").module
    assert text.count('if LOOK == "always":') > 2
    monkeypatch.setattr(module, "architecture", lambda device: major)
    sizes = {"K": key, "V": 32}
    tensors = tuple(torch.empty(1, 8, 1, *(sizes[d] for d in dims)) for dims in module.DIMS)
    assert module.Call(tensors, (None,), None).look == look


@pytest.mark.parametrize("name", ["linear_attention", "gated_delta_rule", "kda", "mdn"])
def test_a_forward_walk_looks_for_nan_once_at_its_end(name: str) -> None:
    """Each look in the loop was a sum over warps, a barrier and a branch that products waited for."""
    (kernel,) = re.findall(rf"^def {name}_fwd_walk\(.*?(?=^@triton)", text_of(name), re.M | re.S)
    loop, careful = kernel.split('if LOOK != "always":')
    assert "has_late_nan" not in kernel
    assert "has_spread" not in kernel
    plain = re.sub(r'^( +)if LOOK == "always":\n(\1 +.*\n)+', "", loop, flags=re.M)
    assert "one_sided_product" not in plain
    assert "one_sided_product" not in careful
    assert plain.count("tl.dot(") == careful.count("tl.dot(") + careful.count("finite_product(")
    assert careful.count("finite_product(") == careful.count("lost_tokens(")
    assert "if has_lost(" in careful
    assert "widened" not in careful


def test_what_spoils_a_product_comes_behind_the_sum_that_takes_it() -> None:
    """The compiler begins a product with what it is added to, there as in the walk without a look."""
    (kernel,) = re.findall(r"^def simple_gla_fwd_walk\(.*?(?=^@triton)", text_of("simple_gla"), re.M | re.S)
    assert re.search(
        r"(b_y_\w+) = finite_product\(.*\n +(b_\w+) = b_y_\w+ \+ \1\n +\2 = \2 \+ lost_tokens\(", kernel
    )
    lines = ["b_y = tl.dot(b_z, b_a)", 'if LOOK == "always":', "    b_y = one_sided_product(b_a, b_z)"]
    cleaned = {"b_y": ("finite_product(b_a, b_z)", "lost_tokens(b_z)")}
    alone = ["b_y = finite_product(b_a, b_z)", "b_y = b_y + lost_tokens(b_z)"]
    assert looking_always([*lines, "b_o = 2.0 * b_y"], cleaned) == [*alone, "b_o = 2.0 * b_y"]
    assert looking_always([*lines, "b_o = b_x + b_y"], cleaned) == [
        "b_y = finite_product(b_a, b_z)", "b_o = b_x + b_y", "b_o = b_o + lost_tokens(b_z)"
    ]  # fmt: skip


def test_comba_reads_its_query_term_by_term() -> None:
    """q - d k would be formed in registers and go through shared memory: 1060 instructions for 701."""
    (kernel,) = re.findall(r"^def comba_fwd_walk\(.*?(?=^@triton)", text_of("comba"), re.M | re.S)
    assert "b_q.to(DOT)" in kernel
    assert "b_q_1" not in kernel
    assert "widened(b_q" not in kernel


def test_what_the_state_does_not_see_is_looked_at_at_once() -> None:
    """A walk that keeps states runs once."""
    op = ld.compile(ld.ops.simple_gla.spec, backend="triton", nan_exact="gradients")
    (keeps,) = re.findall(r"^def simple_gla_bwd_forward_k\(.*?(?=^@triton)", op.source(), re.M | re.S)
    assert "has_lost" not in keeps
    assert "if has_late_nan(" in keeps


def test_only_a_state_that_hands_on_all_of_itself_tells_of_a_walk() -> None:
    kernel = kernel_of(plan_of("gated_delta_rule"), "fwd_walk")
    nodes = plan_of("gated_delta_rule").plan.nodes
    found = leaves_trace(nodes, kernel)
    labels = {nodes[n].label for n in found}
    assert {"v", "k", "u_1"} <= labels
    assert not {"q", "o"} & labels
    kernel = kernel_of(plan_of("simple_gla"), "fwd_walk")
    nodes = plan_of("simple_gla").plan.nodes
    assert leaves_trace(nodes, kernel)
    (carry,) = kernel.carries
    fresh = next(n for n in kernel.body if nodes[n].op == "write")  # the state is forgotten every chunk
    assert leaves_trace(nodes, replace(kernel, carries=((carry[0], fresh),))) == frozenset()


def test_operands_of_long_sums_are_cleaned_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sm_90 does it: what is not finite at late tokens leaves no trace in earlier ones."""
    op = ld.compile(TEXTS["gated_delta_rule"], backend="triton")
    tensors = draw(op.spec, 1, 12, 1, 130, 16, dtype=torch.float32, seed=1)
    plain = op(**tensors)
    monkeypatch.setattr(op.operator("triton").module, "architecture", lambda device: 9)
    assert torch.allclose(op(**tensors), plain, atol=1e-6)
    spoilt = {n: x.clone() for n, x in tensors.items()}
    spoilt["v"][:, 7, :, 3], spoilt["v"][:, 9, :, 5] = float("nan"), float("inf")
    o = op(**spoilt)
    assert torch.allclose(o[:, :7], plain[:, :7], atol=1e-6)
    assert not o[:, 7:, :, 3].isfinite().any()
    assert not o[:, 9:, :, 5].isfinite().any()
    rest = [i for i in range(16) if i not in (3, 5)]
    assert torch.allclose(o[..., rest], plain[..., rest], atol=1e-6)
