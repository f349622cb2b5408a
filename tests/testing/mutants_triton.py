"""Faults of the kernels: masks, strides, maps of heads, tables of sequences, sums over programs."""

from __future__ import annotations

from collections.abc import Mapping

from edits import Assigned, Masks, Module, Never, Rewrite
from mutant import Mutant


def _is_ratio(found: Mapping[str, str]) -> bool:
    return found["_r"].startswith("R_")


_KEPT = "KEPT = {}\n"
_TWO = (("schedule", "two_level"), ("super_chunk", 1))
_PAIRS = "tl.exp(tl.where(_inside, _sums, 0.0))"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "tokens_loaded_past_the_end",
        "gla",
        "triton",
        "loads have no mask at the end of a sequence: the ragged chunk sees what lies behind it",
        text=(Masks("tl.load", "m_t", "(o_t >= 0)"),),
    ),
    Mutant(
        "tokens_stored_past_the_end",
        "gla",
        "triton",
        "stores have no mask at the end of a sequence",
        text=(Masks("tl.store", "m_t", "(o_t >= 0)"),),
    ),
    Mutant(
        "key_channels_loaded_past_k",
        "gated_delta_rule",
        "triton",
        "loads have no mask over key channels: padding of a tile holds the next head's",
        text=(Masks("tl.load", "m_k", "(o_k >= 0)", within="_fwd_"),),
    ),
    Mutant(
        "value_channels_stored_past_v",
        "delta_rule",
        "triton",
        "stores have no mask over value channels",
        text=(Masks("tl.store", "m_v", "(o_v >= 0)", within="_fwd_"),),
    ),
    Mutant(
        "inclusive_read_is_strict",
        "simple_gla",
        "triton",
        "the pair of a token with itself is left out of the scores",
        text=(Rewrite("_x if INCLUSIVE else _y", "_y"),),
    ),
    Mutant(
        "difference_of_cumulated_gates",
        "gated_delta_rule",
        "triton",
        "decays of pairs are exponentials of differences of cumulated sums: NaN at resets",
        text=(
            Rewrite(
                _PAIRS, "tl.exp(tl.where(_inside, tl.cumsum(w, 0)[:, None] - tl.cumsum(w, 0)[None, :], 0.0))"
            ),
        ),
    ),
    Mutant(
        "exp_before_mask",
        "simple_gla",
        "triton",
        "the exponential is taken of all pairs and then multiplied by the mask: inf times 0",
        text=(
            Rewrite(
                f"tl.where(_inside, {_PAIRS}, 0.0)",
                "tl.exp(tl.cumsum(w, 0)[:, None] - tl.cumsum(w, 0)[None, :]) * _inside.to(tl.float32)",
            ),
        ),
    ),
    Mutant(
        "anchor_in_the_future",
        "simple_gla",
        "triton",
        "decays are relative to the smallest gate of the chunk: right numbers whose bits see the future",
        text=(Rewrite(_PAIRS, "tl.exp(tl.where(_inside, _sums - tl.min(w), 0.0)) * tl.exp(tl.min(w))"),),
    ),
    Mutant(
        "wrong_anchor",
        "kda",
        "triton",
        "the anchor of a pair of blocks is one token off: intervals end before their last token",
        text=(
            Rewrite(
                "anchored_intervals(_l, C, EXCLUSIVE=False)", "anchored_intervals(_l, C, EXCLUSIVE=True)"
            ),
        ),
    ),
    Mutant(
        "diagonal_counted_twice",
        "kda",
        "triton",
        "the pair of a token with itself is added to the scores twice",
        text=(
            Rewrite(
                "tl.where(o_t[:, None] >= o_t[None, :], _x, 0.0)",
                "tl.where(o_t[:, None] > o_t[None, :], _x, "
                "tl.where(o_t[:, None] == o_t[None, :], 2.0 * _x, 0.0))",
                within="_fwd_",
            ),
        ),
    ),
    Mutant(
        "steep_decays_scaled_from_the_start",
        "gla",
        "triton",
        "scores are products of rows scaled from the start of the chunk however strong the gates",
        text=(Rewrite("tl.abs(_x) > STEEP", "tl.abs(_x) > 1e30"),),
    ),
    Mutant(
        "interleaved_head_map",
        "gla",
        "triton",
        "grouped heads are mapped by remainder where they are mapped by division",
        text=(Rewrite("i_h // _r", "i_h % (H // _r)", when=_is_ratio),),
    ),
    Mutant(
        "stride_of_all_heads",
        "gated_delta_rule",
        "triton",
        "tokens of a tensor with fewer heads are H heads apart",
        text=(Rewrite("o_t * (H // _r)", "o_t * H", when=_is_ratio),),
    ),
    Mutant(
        "stride_of_one_head",
        "gla",
        "triton",
        "tokens are one head apart where they are H heads apart",
        text=(Rewrite("o_t * (H // _r)", "o_t", when=_is_ratio),),
    ),
    Mutant(
        "state_without_its_head",
        "retnet",
        "triton",
        "the offset of a state leaves out the head",
        text=(Rewrite("i_n.to(tl.int64) * H + i_h", "i_n.to(tl.int64) * H", within="_walk$"),),
    ),
    Mutant(
        "int32_offsets",
        "gated_delta_rule",
        "triton",
        "offsets are computed in 32 bits: they wrap in tensors of more than 2^31 elements",
        text=(Rewrite("_x.to(tl.int64)", "_x"),),
    ),
    Mutant(
        "int32_offset_of_a_state",
        "gla",
        "triton",
        "the offset of a state alone is computed in 32 bits",
        text=(Rewrite("i_n.to(tl.int64) * H + i_h", "i_n * H + i_h"),),
    ),
    Mutant(
        "int32_offset_of_tokens",
        "hgrn",
        "triton",
        "the offset of a token is computed in 32 bits in a kernel that goes token after token",
        text=(Rewrite("_x.to(tl.int64)", "_x.to(tl.int32)"), Assigned("start", "_value.to(tl.int32)")),
    ),
    Mutant(
        "state_in_bfloat16",
        "gated_delta_rule",
        "triton",
        "the state is rounded to bfloat16 from chunk to chunk",
        text=(Assigned("b_s", "_value.to(tl.bfloat16).to(tl.float32)", "_fwd_walk$", pattern="b_s_next"),),
    ),
    Mutant(
        "operands_in_float16",
        "delta_rule",
        "triton",
        "operands of products are rounded to float16 in a float32 call",
        text=(Rewrite("_x.to(DOT)", "_x.to(tl.float16).to(DOT)"),),
    ),
    Mutant(
        "output_in_float16",
        "simple_gla",
        "triton",
        "the output is rounded to float16 before it is stored as float32",
        text=(Rewrite("_x.to(p_o.dtype.element_ty)", "_x.to(tl.float16).to(p_o.dtype.element_ty)"),),
    ),
    Mutant(
        "initial_state_ignored",
        "gla",
        "triton",
        "the forward starts from zeros whatever the initial state",
        text=(Never("HAS_FIRST", "_fwd_walk$"),),
    ),
    Mutant(
        "initial_state_ignored_in_gradients",
        "gated_delta_rule",
        "triton",
        "the backward's walk over the forward's states starts from zeros",
        text=(Never("HAS_FIRST", "_bwd_forward"),),
    ),
    Mutant(
        "final_state_gradient_dropped",
        "gla",
        "triton",
        "the reverse walks start from zeros whatever the gradient of the final state",
        text=(Never("HAS_FIRST", "_bwd_reverse"),),
    ),
    Mutant(
        "final_state_gradient_dropped_for_keys",
        "delta_rule",
        "triton",
        "one of two reverse walks starts from zeros whatever the gradient of the final state",
        text=(Never("HAS_FIRST", "_bwd_reverse_k$"),),
    ),
    Mutant(
        "initial_state_gradient_of_the_last_chunk",
        "delta_rule",
        "triton",
        "the gradient of the initial state is stored without what the first chunk adds",
        text=(
            Assigned(
                "b_s",
                "_value if (i_step + 1 < chunks) | (chunks == 1) else b_s",
                "_bwd_reverse_v$",
                pattern="b_d_s",
            ),
        ),
    ),
    Mutant(
        "last_gate_of_a_chunk_missing",
        "gated_delta_rule",
        "triton",
        "the decay of a whole chunk leaves out its last token",
        text=(
            Rewrite(
                "tl.exp(tl.sum(_g, 0))", "tl.exp(tl.sum(tl.where(o_t < C - 1, _g, 0.0), 0))", "_fwd_prep$"
            ),
        ),
    ),
    Mutant(
        "boundary_term_dropped",
        "gated_delta_rule",
        "triton",
        "the gradient of gates lacks what a chunk's decay does to its state",
        text=(Rewrite("_decay * b_h", "0.0 * b_h"),),
    ),
    Mutant(
        "first_of_shared_heads",
        "gla",
        "triton",
        "the gradient of a shared head is that of the first head that uses it",
        text=(Rewrite("_d.unflatten(2, (-1, ratio)).sum(3)", "_d.unflatten(2, (-1, ratio))[:, :, :, 0]"),),
    ),
    Mutant(
        "params_of_the_first_chunk",
        "retnet",
        "triton",
        "the gradient of a param is that of the first chunk",
        text=(Rewrite("d.sum(0)", "d[0]", "finish"),),
    ),
    Mutant(
        "blocks_write_one_place",
        "gated_delta_rule",
        "triton",
        "blocks of a walk write their parts of a sum to one place, one over the other",
        text=(Rewrite("_row * BLOCKS + i_block", "_row * BLOCKS"),),
    ),
    Mutant(
        "first_block_of_a_loop",
        "gla",
        "triton",
        "a sum over blocks of keys ends after the first block",
        text=(Rewrite("range(K_BLOCKS)", "range(1)", "_fwd_prep$"),),
    ),
    Mutant(
        "sign_of_a_gradient",
        "gated_delta_rule",
        "triton",
        "the gradient of what is subtracted has the wrong sign",
        text=(Assigned("b_d_v", "_x", pattern="_x * -1.0"),),
    ),
    Mutant(
        "square_states_transposed",
        "linear_attention",
        "triton",
        "states are read and written transposed where K = V",
        text=(
            Assigned(
                "o_s",
                "_x + (_k * V + _v if K != V else _v * K + _k)",
                "_fwd_walk$",
                pattern="_x + _k * V + _v",
            ),
        ),
    ),
    Mutant(
        "final_state_value_first",
        "simple_gla",
        "triton",
        "the final state is written as [V, K]",
        text=(
            Assigned(
                "o_s",
                "_x + (o_v[:, None] * K + o_k[None, :] if not HAS_FIRST else _k * V + _v)",
                "_fwd_walk$",
                pattern="_x + _k * V + _v",
            ),
        ),
    ),
    Mutant(
        "chunks_of_the_neighbour",
        "gated_delta_rule",
        "triton",
        "the first chunk of a packed sequence belongs to the one before",
        text=(Rewrite("_a // C + middle <= i", "_a // C + middle < i"),),
    ),
    Mutant(
        "tables_kept_by_length",
        "gla",
        "triton",
        "tables of a dense batch are kept by its length alone, not by its size",
        text=(
            Rewrite(
                "make_dense_tables(batch, length, chunk, device)",
                "KEPT.setdefault((length, chunk), make_dense_tables(batch, length, chunk, device))",
                "^kept_dense_tables$",
            ),
            Module(_KEPT),
        ),
    ),
    Mutant(
        "cotangent_taken_for_contiguous",
        "gla",
        "triton",
        "the gradient of the output is read as if it were contiguous",
        text=(
            Rewrite(
                "d_o.contiguous()", "torch.as_strided(d_o, d_o.shape, torch.empty(d_o.shape).stride(), 0)"
            ),
        ),
    ),
    Mutant(
        "carried_boundary_restarts_late",
        "gated_delta_rule",
        "triton",
        "carried boundary terms are formed anew one chunk beside the one whose state was kept",
        text=(Rewrite("(i_c + 1) % 8 == 0", "(i_c + 1) % 8 == 1", "_bwd_reverse"),),
    ),
    Mutant(
        "inverse_for_ordinary_keys",
        "delta_rule",
        "triton",
        "the last doubling of the triangular inverse is left out",
        text=(Rewrite("range(1, LEVELS)", "range(1, LEVELS - 1)", "_fwd_prep$"),),
    ),
    Mutant(
        "scale_missing_in_the_backward",
        "gla",
        "triton",
        "the gradient of the output is not scaled where the output is",
        text=(Rewrite("scale * _x", "_x", "_bwd_"),),
    ),
    Mutant(
        "ragged_chunk_left_out",
        "gated_delta_rule",
        "triton",
        "the walk ends before the ragged last chunk",
        text=(
            Rewrite(
                "(length + STEP - 1) // STEP", "(length + (length < STEP) * (STEP - 1)) // STEP", "_fwd_walk$"
            ),
        ),
    ),
    Mutant(
        "ragged_chunk_of_no_sequence",
        "gla",
        "triton",
        "the table of packed sequences has no owner for a ragged chunk: nothing is prepared for it",
        text=(Rewrite("chunk * C < end - begin", "(chunk + 1) * C <= end - begin"),),
    ),
    Mutant(
        "own_gate_counted_to_the_end",
        "gated_delta_rule",
        "triton",
        "what a token writes is decayed by its own gate on the way to the end of the chunk",
        text=(
            Rewrite(
                "running_sums(_g, C, DOT, AFTER=True, STRICT=True)",
                "running_sums(_g, C, DOT, AFTER=True, STRICT=False)",
                "_fwd_prep$",
            ),
        ),
    ),
    Mutant(
        "state_read_with_the_chunk_decayed",
        "gla",
        "triton",
        "the output reads the state after the chunk's decay",
        text=(
            Assigned(
                "b_since_start", "tl.exp2(tl.sum(b_log2_gate, 1))[:, None] + 0.0 * _value", "_fwd_prep$"
            ),
        ),
    ),
    Mutant(
        "other_path_without_gradients",
        "delta_rule",
        "triton",
        "a call that saves nothing for the backward scales its output otherwise",
        text=(
            Rewrite(
                "_x.to(p_o.dtype.element_ty)",
                "((1.0 if SAVE else 1.001) * _x).to(p_o.dtype.element_ty)",
                "_fwd_walk$",
            ),
        ),
    ),
    Mutant(
        "padding_updates_the_state",
        "hgrn",
        "triton",
        "tokens beyond the end of a sequence update its state",
        text=(Assigned("b_h", "_x", "_forward$", pattern="tl.where(live, _x, _y)"),),
    ),
    Mutant(
        "ragged_group_left_out",
        "hgrn",
        "triton",
        "a kernel that loads tokens in groups leaves out the last, ragged group",
        text=(Rewrite("(length + U - 1) // U", "length // U", "_forward$"),),
    ),
    Mutant(
        "states_taken_up_in_order",
        "hgrn",
        "triton",
        "the backward takes the states before its tokens in the order of the forward",
        text=(Rewrite("_every[W - 1 - i]", "_every[i]", "_backward$"),),
    ),
    Mutant(
        "map_not_transposed_in_reverse",
        "gated_delta_rule",
        "triton",
        "in two levels, gradients go back through the map of a super-chunk, not through its transpose",
        text=(Never("REVERSE", "_super_scan$"),),
        options=_TWO,
    ),
    Mutant(
        "super_chunk_adds_nothing",
        "gla",
        "triton",
        "in two levels, what a super-chunk makes of zeros is left out of the state before the next",
        text=(Assigned("b_s", "_x", "_super_scan$", pattern="_x + _y"),),
        options=_TWO,
    ),
    Mutant(
        "write_forgotten_by_the_state",
        "retnet",
        "triton",
        "a chunk hands on its decayed state without what it wrote",
        text=(Assigned("b_s_next", "_x", "_fwd_walk$", pattern="_x + _y"),),
    ),
)
