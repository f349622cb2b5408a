"""Faults of the PyTorch modules, of the loops over chunks and tokens that they call, and of decoding."""

from __future__ import annotations

from edits import Assigned, Begins, LoopBegins, Module, Rewrite
from mutant import Mutant

_OVER = "sequences(cu_seqlens, batch, length)"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "inclusive_for_exclusive",
        "rwkv6",
        "torch",
        "a read of the state before the update decays to the token itself",
        text=(Rewrite("read == 'exclusive'", "False"),),
    ),
    Mutant(
        "strict_for_inclusive",
        "mamba2",
        "torch",
        "the pair of a token with itself is left out of the scores",
        text=(Rewrite("0 if read == 'inclusive' else -1", "-1"),),
    ),
    Mutant(
        "gates_by_difference",
        "simple_gla",
        "torch",
        "decays of pairs are exponentials of differences of cumulated sums: NaN at resets",
        text=(
            Assigned(
                "decay", "torch.exp(w.cumsum(-1)[..., :, None] - w.cumsum(-1)[..., None, :])", "^pair_decay$"
            ),
        ),
    ),
    Mutant(
        "later_gates_with_the_own",
        "gated_delta_rule",
        "torch",
        "the decay from a token to the end of its chunk holds the token's own gate",
        text=(Rewrite("before(x.flip(dim), dim).flip(dim)", "since(x, dim)", "^after$"),),
    ),
    Mutant(
        "neumann_series",
        "delta_rule",
        "torch",
        "the triangular system is solved by four terms of its series: right for nearly orthogonal keys",
        text=(Begins("^substitute$", "return right + system @ (right + system @ (right + system @ right))"),),
    ),
    Mutant(
        "reversed_system_not_transposed",
        "kda",
        "torch",
        "the backward solves the forward's system",
        text=(Rewrite("substitute_reversed(_a, _b)", "substitute(_a, _b)"),),
    ),
    Mutant(
        "diagonal_in_the_gradient",
        "delta_rule",
        "torch",
        "the gradient of a strict score has a diagonal",
        text=(Rewrite("_x.tril(-1)", "_x.tril(0)", "^backward_chunk$"),),
    ),
    Mutant(
        "packed_from_the_first_state",
        "gla",
        "torch",
        "every packed sequence starts from the first one's state",
        text=(Rewrite("(slice(n, n + 1), *pair)", "(slice(0, 1), *pair)"),),
    ),
    Mutant(
        "empty_sequence_loses_its_state",
        "gated_delta_rule",
        "torch",
        "the final state of an empty sequence is zero, not its initial state",
        text=(LoopBegins(_OVER, "for x in states: x[rows] = x[rows] * float(last > first)", "^run_chunks$"),),
    ),
    Mutant(
        "empty_sequence_loses_its_gradient",
        "gla",
        "torch",
        "the gradient of an empty sequence's initial state is zero, not that of its final state",
        text=(
            LoopBegins(
                "reversed(spans)",
                "for x in d_states: x[rows] = x[rows] * float(len(chunks) > 0)",
                "^reverse_chunks$",
            ),
        ),
    ),
    Mutant(
        "offsets_one_off",
        "simple_gla",
        "torch",
        "packed sequences begin one token late",
        text=(
            Assigned(
                "bounds", "[b + (0 < i < len(_value) - 1 and b < _value[-1]) for i, b in enumerate(_value)]"
            ),
        ),
    ),
    Mutant(
        "tiled_heads",
        "gla",
        "torch",
        "shared heads are repeated as a whole where each is repeated in place",
        text=(Rewrite("_x.repeat_interleave(_n, dim=1)", "torch.cat([_x] * (_n), 1)"),),
    ),
    Mutant(
        "gradient_of_the_first_shared_head",
        "simple_gla",
        "torch",
        "the sum over heads that share a tensor is its first term",
        text=(Rewrite("_d.unflatten(1, (heads, -1)).sum(2)", "_d.unflatten(1, (heads, -1))[:, :, 0]"),),
    ),
    Mutant(
        "param_of_the_first_row",
        "retnet",
        "torch",
        "the gradient of a param is that of the first row of the batch",
        text=(Rewrite("part.sum(0)", "part[0]"),),
    ),
    Mutant(
        "gradient_state_not_filled",
        "delta_rule",
        "torch",
        "the gradient of the final state accumulates into memory that nobody filled",
        text=(Rewrite("tensors[0].new_zeros(_s, dtype=work)", "tensors[0].new_empty(_s, dtype=work)"),),
    ),
    Mutant(
        "final_state_not_seen_backwards",
        "gated_delta_rule",
        "torch",
        "the gradient of the final state is dropped",
        text=(Rewrite("d_finals or ()", "()"),),
    ),
    Mutant(
        "states_of_the_chunk_before",
        "gla",
        "torch",
        "the backward takes up the state before the chunk before",
        text=(Rewrite("start[index]", "start[max(index - 1, 0)]", "^reverse_chunks$"),),
    ),
    Mutant(
        "kept_states_in_bfloat16",
        "kda",
        "torch",
        "the states that are kept for the backward are bfloat16",
        text=(
            Rewrite(
                "[start[index] for start in residuals]",
                "[start[index].bfloat16().to(work) for start in residuals]",
            ),
        ),
    ),
    Mutant(
        "double_in_single",
        "hgrn2",
        "torch",
        "float64 operands pass through float32",
        text=(Rewrite("x.to(work)", "x.float().to(work)", "^operands$"),),
    ),
    Mutant(
        "result_in_another_type",
        "linear_attention",
        "torch",
        "the output is float32 whatever the inputs",
        text=(Assigned("kind", "torch.float32", "^output_of$"),),
    ),
    Mutant(
        "gates_of_the_token_before",
        "simple_gla",
        "torch",
        "gates are those of the previous token",
        text=(
            Begins(
                "^(forward|backward)_chunk$", "g = torch.cat([torch.zeros_like(g[..., :1]), g[..., :-1]], -1)"
            ),
        ),
    ),
    Mutant(
        "keys_for_values_if_square",
        "gla",
        "torch",
        "the state is transposed from chunk to chunk where K = V",
        text=(
            Assigned(
                "s_next", "_value.mT if _value.shape[-1] == _value.shape[-2] else _value", "^forward_chunk$"
            ),
        ),
    ),
    Mutant(
        "results_kept_by_shape",
        "linear_attention",
        "torch",
        "a call gives what the first call of these shapes gave",
        text=(
            Rewrite(
                "run_chunks(forward_chunk, LAYOUT, call, dry)",
                "KEPT.setdefault((dry, save, *(x.shape for x in tensors)), "
                "run_chunks(forward_chunk, LAYOUT, call, dry))",
            ),
            Module("KEPT = {}"),
        ),
    ),
    Mutant(
        "results_kept_by_address",
        "gla",
        "torch",
        "a call gives what an earlier call with tensors at these addresses gave",
        text=(
            Rewrite(
                "run_chunks(forward_chunk, LAYOUT, call, dry)",
                "KEPT.setdefault((dry, save, *((x.data_ptr(), x.shape) for x in tensors)), "
                "run_chunks(forward_chunk, LAYOUT, call, dry))",
            ),
            Module("KEPT = {}"),
        ),
    ),
    Mutant(
        "calls_are_counted",
        "gla",
        "torch",
        "what an earlier call left behind enters the next: every second call is a rounding off",
        text=(
            Begins("^forward_chunk$", "COUNT.append(1)\nq = q * (1 + 1e-6 * (len(COUNT) % 2))"),
            Module("COUNT = []"),
        ),
    ),
    Mutant(
        "query_scaled_in_place",
        "gla",
        "torch",
        "the queries are scaled where they lie",
        text=(Begins("^forward_chunk$", "q = q.mul_(1.0 + 2.0 ** -20)"),),
    ),
    Mutant(
        "future_in_the_last_bits",
        "retnet",
        "torch",
        "the output has the mean of the chunk's values in its last bits",
        text=(Assigned("o", "_value + 2.0 ** -51 * v.mean(-2, keepdim=True)", "^forward_chunk$"),),
    ),
    Mutant(
        "rows_meet",
        "hgrn2",
        "torch",
        "a sum runs over the batch: rows see each other in their last bits",
        text=(Assigned("o", "_value + 2.0 ** -51 * v.mean(0, keepdim=True)", "^forward_chunk$"),),
    ),
    Mutant(
        "heads_meet",
        "linear_attention",
        "torch",
        "a normalisation runs over the heads: they see each other in their last bits",
        text=(Assigned("o", "_value + 2.0 ** -51 * v.mean(1, keepdim=True)", "^forward_chunk$"),),
    ),
    Mutant(
        "other_sums_without_gradients",
        "gla",
        "torch",
        "a call that saves nothing for the backward decays its output",
        text=(
            Rewrite(
                "_f(*carried, *args, *consts)",
                "(lambda y, s: (y if save else y * 0.999, s))(*_f(*carried, *args, *consts))",
                "^run_chunks$",
            ),
        ),
    ),
    Mutant(
        "nan_reaches_earlier_tokens",
        "gla",
        "torch",
        "what is not finite is multiplied by the zeros of a mask: it reaches earlier tokens of its chunk",
        text=(Rewrite("bad and any(_x)", "False", "^pieces$"),),
    ),
    Mutant(
        "reset_in_the_gradient",
        "kda",
        "torch",
        "the gradient of a gate is divided by the decay: NaN at a reset",
        text=(
            Rewrite("after(_w, -2).exp()", "(after(_w, -2).exp() * _w.exp() / _w.exp())", "^backward_chunk$"),
        ),
    ),
    Mutant(
        "slots_of_another_state",
        "mdn",
        "torch",
        "of two coupled states the gradient of the second's final value is dropped",
        text=(
            Rewrite("zip(d_states, d_finals or ())", "zip(d_states[:1], d_finals or ())", "^reverse_chunks$"),
        ),
    ),
    Mutant(
        "token_states_one_late",
        "hgrn",
        "torch",
        "the states before a group of tokens are kept after its first token",
        text=(
            Rewrite(
                "(t - first) % layout['chunk'] == 0",
                "(t - first) % layout['chunk'] == min(1, last - first - 1)",
            ),
        ),
    ),
    Mutant(
        "stale_slot",
        "gated_delta_rule",
        "torch",
        "a step reads the row of the sequence before it in the pool",
        decode=(
            Assigned(
                "now",
                "[state[rows.roll(1) if slots is not None else rows].to(work) for state in states]",
                "^step$",
                first=True,
            ),
        ),
    ),
    Mutant(
        "padding_is_written",
        "gla",
        "torch",
        "a step writes the states of sequences without a slot to the first row of the pool",
        decode=(Rewrite("slots >= 0", "slots >= -1", "^step$"),),
    ),
    Mutant(
        "drafts_are_kept",
        "delta_rule",
        "torch",
        "a step keeps the state after rejected drafts",
        decode=(
            Rewrite("accepted > t", "accepted > t - 1", "^step$"),
            Rewrite("t < keep", "t <= keep", "^step$"),
        ),
    ),
    Mutant(
        "decode_reads_before_the_update",
        "simple_gla",
        "torch",
        "a step reads the state before its update",
        decode=(Rewrite("S_next * q[..., None]", "S * q[..., None]", "^forward_token$"),),
    ),
    Mutant(
        "decode_state_in_bfloat16",
        "gla",
        "torch",
        "a step rounds the state it leaves to bfloat16",
        decode=(Rewrite("x.to(state.dtype)", "x.bfloat16().to(state.dtype)", "^step$"),),
    ),
)
