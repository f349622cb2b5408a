"""What generated PyTorch modules import: the loops over chunks and tokens, and what their statements call.

A module's ``LAYOUT`` says what the loops ask: ``timed`` (per tensor), ``states`` (the axes of each),
``starts``, ``output`` (axes), ``outputs`` (how many, if several), ``sizes`` (axis: which tensor has it, and
where), ``like`` (the tensor whose dtype the output has), ``wide`` (it has the states' instead), ``chunk``
(tokens), ``shortest`` (an axis, and for 1, 2, ... channels of it the most tokens of a chunk) and
``gradients`` (which tensors have one). An exported file holds those functions that it uses.
"""

# ruff: noqa: B905, RUF007 (whole sequences of one module: their lengths are known to agree)

import torch


def run_chunks(forward_chunk, layout, call, dry):
    """(o, final states or None, residuals) chunk by chunk; ``dry`` allocates the results and no more.

    Of several outputs o is a tuple, as ``d_o`` is in reverse.

    ``call``: tensors, initial states, consts, cu_seqlens, whether final states are wanted, and residuals.
    Tensors are contiguous, [B, T, h, ...] or per head [h, ...], where h divides the largest head count H; a
    state is [N, H, ...] or None; cu_seqlens [N + 1] packs N sequences into a batch of one. Residuals: the
    states before every chunk.
    """
    tensors, initial_states, consts, cu_seqlens, output_final_state, save = call
    work, (batch, length, heads, size) = work_type(tensors), sizes_of(tensors, layout, initial_states)
    count, lanes = lanes_of(cu_seqlens, batch)
    layout = fitted(layout, size)
    o, turned = output_of(tensors, layout, initial_states), layout["states"][0] == ("V", "K")
    axes, like = layout["states"], tensors[0]
    states = tuple(like.new_zeros((count, heads, *size(dims)), dtype=work) for dims in axes)
    shape = (marks_of(cu_seqlens, length, count, layout), lanes, heads, *size(("K", "V")))
    starts = [like.new_zeros(shape, dtype=work) for _ in axes if save]
    if not dry:
        for state, first in zip(states, initial_states):
            if first is not None:
                state.copy_(first)
        index, bad = 0, not_finite(tensors, layout["timed"], layout["resets"])
        for rows, first, last in sequences(cu_seqlens, batch, length):
            carried = [state[rows].mT if turned else state[rows] for state in states]
            for begin, end in chunks_of(first, last, layout):
                for start, S in zip(starts, carried):
                    start[index] = S
                index += 1
                for span in pieces(begin, end, bad):
                    args = operands(tensors, layout, span, heads, work)
                    out, carried = forward_chunk(*carried, *args, *consts)
                    for room, rows_of_chunk in zip(as_tuple(o), as_tuple(out)):
                        room[:, slice(*span)] = rows_of_chunk.transpose(1, 2)
            for state, S in zip(states, carried):
                state[rows] = S.mT if turned else S
    return o, states if output_final_state else None, starts


def reverse_chunks(forward_chunk, backward_chunk, layout, call, d_o, d_finals, dry):
    """(gradients in the order of tensors, one gradient or None per initial state), from the last chunk.

    ``call``: tensors, initial states, consts, cu_seqlens and residuals, as ``run_chunks`` has them.
    """
    tensors, initial_states, consts, cu_seqlens, residuals = call
    work, (batch, length, heads, size) = work_type(tensors), sizes_of(tensors, layout, initial_states)
    count, _ = lanes_of(cu_seqlens, batch)
    layout = fitted(layout, size)
    (grads, totals), turned = gradients_of(tensors, layout), layout["states"][0] == ("V", "K")
    d_states = [tensors[0].new_zeros((count, heads, *size(dims)), dtype=work) for dims in layout["states"]]
    if not dry:
        for d, given in zip(d_states, d_finals or ()):
            if given is not None:
                d.copy_(given)
        spans = [(rows, chunks_of(*span, layout)) for rows, *span in sequences(cu_seqlens, batch, length)]
        index = sum(len(chunks) for _, chunks in spans)
        more = as_tuple(d_o)
        flags = (*layout["timed"], *[True] * len(more)), (*layout["resets"], *[False] * len(more))
        bad = not_finite((*tensors, *more), *flags)
        for rows, chunks in reversed(spans):
            carried = [d[rows].mT if turned else d[rows] for d in d_states]
            for begin, end in reversed(chunks):
                index -= 1
                each = pieces(begin, end, bad)
                past = [[start[index] for start in residuals]]
                for span in each[:-1]:
                    args = operands(tensors, layout, span, heads, work)
                    past.append(forward_chunk(*past[-1], *args, *consts)[1])
                for span in reversed(each):
                    d_outs = [d[:, slice(*span)].to(work).transpose(1, 2) for d in more]
                    args = operands(tensors, layout, span, heads, work)
                    carried, parts = backward_chunk(*past.pop(), *carried, *d_outs, *args, *consts)
                    for i, part in enumerate(parts):
                        if part is not None and totals[i] is None:
                            grads[i][:, slice(*span)] = shared(part, grads[i].shape[2]).transpose(1, 2)
                        elif part is not None:
                            totals[i] = totals[i] + part.sum(0)
            for d, dS in zip(d_states, carried):
                d[rows] = dS.mT if turned else dS
        add_totals(grads, totals)
    return grads, tuple(None if x is None else d.to(x.dtype) for x, d in zip(initial_states, d_states))


def not_finite(tensors, timed, resets):
    """Tokens where something is NaN or infinite, save the -inf of a gate in log space, which is a reset."""
    if tensors[timed.index(True)].device.type != "cpu":  # it would wait for the device
        return ()
    bad = None
    for x, has_tokens, reset in zip(tensors, timed, resets):
        if has_tokens:
            odd = (x.isnan() | (x == float("inf")) if reset else ~x.isfinite()).flatten(2).any(2).any(0)
            bad = odd if bad is None else bad | odd
    return bad.nonzero()[:, 0].tolist()


def pieces(begin, end, bad):
    """A chunk, or its tokens one by one: in a product of matrices 0 x NaN would reach earlier tokens."""
    if bad and any(begin <= t < end for t in bad):
        return [(t, t + 1) for t in range(begin, end)]
    return [(begin, end)]


def run_tokens(forward_token, layout, call, dry):
    """What ``run_chunks`` gives, token by token; residuals: the states before every ``chunk``-th token."""
    tensors, initial_states, consts, cu_seqlens, output_final_state, save = call
    work, (batch, length, heads, size) = work_type(tensors), sizes_of(tensors, layout, initial_states)
    count, lanes = lanes_of(cu_seqlens, batch)
    o, shapes = output_of(tensors, layout, initial_states), [size(dims) for dims in layout["states"]]
    starts, like = zip(shapes, layout["starts"]), tensors[0]
    finals = [like.new_full((count, heads, *shape), start, dtype=work) for shape, start in starts]
    lead = (marks_of(cu_seqlens, length, count, layout), lanes, heads)
    marks = [like.new_zeros((*lead, *shape), dtype=work) for shape in shapes] if save else []
    if not dry:
        for final, initial in zip(finals, initial_states):
            if initial is not None:
                final.copy_(initial)
        index = 0
        for rows, first, last in sequences(cu_seqlens, batch, length):
            states = [final[rows] for final in finals]
            for t in range(first, last):
                if save and (t - first) % layout["chunk"] == 0:
                    for mark, state in zip(marks, states):
                        mark[index] = state
                    index += 1
                args = operands(tensors, layout, t, heads, work)
                out, *states = forward_token(*states, *args, *consts)
                for room, row in zip(as_tuple(o), as_tuple(out)):
                    room[:, t] = row
            for final, state in zip(finals, states):
                final[rows] = state
    return o, tuple(finals) if output_final_state else None, marks


def reverse_tokens(forward_token, backward_token, layout, call, d_o, d_finals, dry):
    """What ``reverse_chunks`` gives: chunk by chunk from the last the states before every token of it once
    more, then its tokens in reverse.
    """
    tensors, initial_states, consts, cu_seqlens, residuals = call
    work, (batch, length, heads, size) = work_type(tensors), sizes_of(tensors, layout, initial_states)
    count, _ = lanes_of(cu_seqlens, batch)
    grads, totals = gradients_of(tensors, layout)
    d_states = [tensors[0].new_zeros((count, heads, *size(dims)), dtype=work) for dims in layout["states"]]
    if not dry:
        for d_state, d_final in zip(d_states, d_finals or ()):
            if d_final is not None:
                d_state.copy_(d_final)
        spans = [(rows, chunks_of(*span, layout)) for rows, *span in sequences(cu_seqlens, batch, length)]
        index = sum(len(chunks) for _, chunks in spans)
        for rows, chunks in reversed(spans):
            d_now = [d_state[rows] for d_state in d_states]
            for begin, end in reversed(chunks):
                index -= 1
                before = [[mark[index] for mark in residuals]]
                for t in range(begin, end - 1):
                    args = operands(tensors, layout, t, heads, work)
                    before.append(forward_token(*before[-1], *args, *consts)[1:])
                for t in reversed(range(begin, end)):
                    args = operands(tensors, layout, t, heads, work)
                    d_outs = [d[:, t].to(work) for d in as_tuple(d_o)]
                    d_now, parts = backward_token(*before.pop(), *d_now, *d_outs, *args, *consts)
                    for i, part in enumerate(parts):
                        if part is not None and totals[i] is None:
                            grads[i][:, t] = shared(part, grads[i].shape[2])
                        elif part is not None:
                            totals[i] = totals[i] + part.sum(0)
            for d_state, d in zip(d_states, d_now):
                d_state[rows] = d
        add_totals(grads, totals)
    return grads, tuple(None if x is None else d.to(x.dtype) for x, d in zip(initial_states, d_states))


def sizes_of(tensors, layout, initial_states):
    """(B, T, H, the sizes of axes)."""
    timed, where = layout["timed"], layout["sizes"]
    known = {axis: tensors[i].shape[at] for axis, (i, at) in where.items()}
    batch, length = tensors[timed.index(True)].shape[:2]
    counts = [x.shape[2 if t else 0] for x, t in zip(tensors, timed)]
    heads = max([*counts, *(x.shape[1] for x in initial_states if x is not None)])
    return batch, length, heads, lambda dims: [known.get(d, d) for d in dims]


def output_of(tensors, layout, initial_states):
    """Room for the output [B, T, H, ...], of several for each."""
    batch, length, heads, size = sizes_of(tensors, layout, initial_states)
    like = tensors[layout["like"]]
    kind = work_type(tensors) if layout["wide"] else like.dtype
    shape = (batch, length, heads, *size(layout["output"]))
    made = tuple(like.new_empty(shape, dtype=kind) for _ in range(layout.get("outputs", 1)))
    return made if len(made) > 1 else made[0]


def as_tuple(values):
    """A tuple of values as it is, a single one as a tuple."""
    return values if isinstance(values, tuple) else (values,)


def gradients_of(tensors, layout):
    """Room for the gradients, and for the sums of those of params."""
    grads = [torch.zeros_like(x) if has else None for x, has in zip(tensors, layout["gradients"])]
    return grads, [None if timed else 0.0 for timed in layout["timed"]]


def add_totals(grads, totals):
    """Puts the sums of the gradients of params into their places."""
    for grad, total in zip(grads, totals):
        if grad is not None and isinstance(total, torch.Tensor):
            grad.copy_(shared(total[None], grad.shape[0])[0])


def lanes_of(cu_seqlens, batch):
    """How many sequences there are, and how many run side by side."""
    return (batch, batch) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, 1)


def marks_of(cu_seqlens, length, count, layout):
    """How many chunks there may be: never one, which torch.compile would specialise on."""
    return length // layout["chunk"] + (1 if cu_seqlens is None else count) + 1


def fitted(layout, size):
    """The layout with chunks as short as few channels along the erased axis need them."""
    axis, most = layout["shortest"]
    channels = size((axis,))[0] if most else 1
    return layout if channels > len(most) else {**layout, "chunk": min(layout["chunk"], most[channels - 1])}


def chunks_of(first, last, layout):
    """(begin, end) of the chunks of a sequence."""
    chunk = layout["chunk"]
    return [(begin, min(begin + chunk, last)) for begin in range(first, last, chunk)]


def operands(tensors, layout, tokens, heads, work):
    """Those of a chunk (begin, end), [B, H, C, ...], or of one token, [B, H, ...]; params are [1, H, ...]."""
    parts = []
    for x, timed in zip(tensors, layout["timed"]):
        if not timed:
            x = x[None]
        elif isinstance(tokens, tuple):
            x = x[:, slice(*tokens)].transpose(1, 2)
        else:
            x = x[:, tokens]
        x = x.to(work)
        parts.append(x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1))
    return parts


def work_type(tensors):
    """The type in which everything is computed."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def sequences(cu_seqlens, batch, length):
    """(entries of the state, first token, end) of each sequence; a dense batch is one entry."""
    if cu_seqlens is None:
        return [(slice(0, batch), 0, length)]
    bounds = cu_seqlens.tolist()
    return [(slice(n, n + 1), *pair) for n, pair in enumerate(zip(bounds, bounds[1:]))]


def shared(d, heads):
    """Sums a gradient [B, H, ...] over each group of heads that shares one of ``heads``."""
    return d if d.shape[1] == heads else d.unflatten(1, (heads, -1)).sum(2)


def step(a, b):
    """1 where a > b, 1/2 where they are equal, 0 elsewhere."""
    return (a > b).to(a.dtype) + (a == b).to(a.dtype) / 2


def side(x):
    """-1 below 0, else 1."""
    return 1 - 2 * (x < 0).to(x.dtype)


def shifted(x, dim):
    """x one token later, after a 1."""
    return torch.cat([torch.ones_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)


def repeat(x, dim, size):
    """x repeated along a new axis, which becomes axis dim."""
    x = x.unsqueeze(dim)
    return x.expand(*x.shape[:dim], size, *x.shape[dim:][1:])


def before(x, dim):
    """At every token the sum over all earlier ones."""
    total = x.cumsum(dim)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), total.narrow(dim, 0, x.shape[dim] - 1)], dim)


def after(x, dim):
    """At every token the sum over all later ones."""
    return before(x.flip(dim), dim).flip(dim)


def since(x, dim):
    """At every token the sum over itself and all later ones."""
    return x.flip(dim).cumsum(dim).flip(dim)


def pair_decay(w, read):
    """[t, s]: exp(w_{s+1} + ... + w_t) for the pairs of a read, else 0. Sums only, so -inf is a reset.

    inclusive: s <= t. decayed: s < t. exclusive: s < t, and the interval ends at t - 1.
    """
    decay = w[..., None].expand(*w.shape, w.shape[-1]).tril(-1).cumsum(-2).exp()
    if read == "exclusive":
        return torch.nn.functional.pad(decay.tril(), (0, 0, 1, -1))
    return decay.tril(0 if read == "inclusive" else -1)


def span_sum(pairs, read):
    """At every token the sum of the pairs [t, s] whose interval of decay holds it."""
    rows = after(pairs, -2) if read == "exclusive" else since(pairs, -2)
    return before(rows, -1).diagonal(dim1=-2, dim2=-1)


def channel_decay(w, read):
    """pair_decay of every channel: w [C, K] to [t, s, K]."""
    return pair_decay(w.mT, read).movedim(-3, -1)


def decayed_score(x, y, w, read):
    """[t, s]: sum over channels of x_t y_s times the decay of the pair.

    By halves: a pair across the middle decays from s to the middle and on to t, both exponents <= 0.
    """
    tokens = w.shape[-2]
    if tokens <= 8:
        return (x[..., :, None, :] * y[..., None, :, :] * channel_decay(w, read)).sum(-1)
    half = tokens // 2
    (x1, x2), (y1, y2), (w1, w2) = ((z[..., :half, :], z[..., half:, :]) for z in (x, y, w))
    onward = (before(w2, -2) if read == "exclusive" else w2.cumsum(-2)).exp()
    cross = (x2 * onward) @ (y1 * after(w1, -2).exp()).mT
    first, second = decayed_score(x1, y1, w1, read), decayed_score(x2, y2, w2, read)
    top = torch.nn.functional.pad(first, (0, tokens - half))
    return torch.cat([top, torch.cat([cross, second], -1)], -2)


def decay_apply(A, z, w, read):
    """[t, K]: sum over s of A_ts z_s times the decay of the pair, by halves as decayed_score."""
    tokens = w.shape[-2]
    if tokens <= 8:
        return (A[..., None] * channel_decay(w, read) * z[..., None, :, :]).sum(-2)
    half = tokens // 2
    (z1, z2), (w1, w2) = ((x[..., :half, :], x[..., half:, :]) for x in (z, w))
    onward = (before(w2, -2) if read == "exclusive" else w2.cumsum(-2)).exp()
    cross = onward * (A[..., half:, :half] @ (after(w1, -2).exp() * z1))
    first = decay_apply(A[..., :half, :half], z1, w1, read)
    return torch.cat([first, cross + decay_apply(A[..., half:, half:], z2, w2, read)], -2)


def decay_apply_t(A, z, w, read):
    """[s, K]: sum over t of A_ts z_t times the decay of the pair, by halves as decayed_score."""
    tokens = w.shape[-2]
    if tokens <= 8:
        return (A[..., None] * channel_decay(w, read) * z[..., :, None, :]).sum(-3)
    half = tokens // 2
    (z1, z2), (w1, w2) = ((x[..., :half, :], x[..., half:, :]) for x in (z, w))
    onward = (before(w2, -2) if read == "exclusive" else w2.cumsum(-2)).exp()
    cross = after(w1, -2).exp() * (A[..., half:, :half].mT @ (onward * z2))
    second = decay_apply_t(A[..., half:, half:], z2, w2, read)
    return torch.cat([cross + decay_apply_t(A[..., :half, :half], z1, w1, read), second], -2)


def pair_gate(A, x, y, w, read):
    """[tau, K]: sum of A_ts x_t y_s times the decay over the pairs whose interval of decay holds tau."""
    tokens = w.shape[-2]
    later = after if read == "exclusive" else since
    if tokens <= 8:
        pairs = A[..., None] * x[..., :, None, :] * y[..., None, :, :] * channel_decay(w, read)
        return before(later(pairs, -3), -2).diagonal(dim1=-3, dim2=-2).mT
    half = tokens // 2
    (x1, x2), (y1, y2), (w1, w2) = ((z[..., :half, :], z[..., half:, :]) for z in (x, y, w))
    onward = (before(w2, -2) if read == "exclusive" else w2.cumsum(-2)).exp()
    ahead, back, cross = x2 * onward, y1 * after(w1, -2).exp(), A[..., half:, :half]
    first = pair_gate(A[..., :half, :half], x1, y1, w1, read) + before(back * (cross.mT @ ahead), -2)
    second = pair_gate(A[..., half:, half:], x2, y2, w2, read) + later(ahead * (cross @ back), -2)
    return torch.cat([first, second], -2)


def substitute(system, right):
    """U of U = right + system U by forward substitution; the system is strictly lower triangular.

    On a CPU its sums are in float64: where keys are alike, as many terms as there are tokens may cancel.
    """
    kind = torch.float64 if right.device.type == "cpu" else right.dtype
    found = torch.linalg.solve_triangular(-system.to(kind), right.to(kind), upper=False, unitriangular=True)
    return found.to(right.dtype)


def substitute_reversed(system, right):
    """X of X = right + system^T X, from the last token to the first."""
    kind = torch.float64 if right.device.type == "cpu" else right.dtype
    found = torch.linalg.solve_triangular(-system.mT.to(kind), right.to(kind), upper=True, unitriangular=True)
    return found.to(right.dtype)


def inverse(system):
    """(I - system)^-1 of a strictly lower triangular system."""
    return substitute(system, torch.eye(system.shape[-1], dtype=system.dtype, device=system.device))


def blocks(x, count):
    """The count x count blocks [C, C] of a matrix whose rows and columns are in the order of tokens."""
    return [row.unbind(-1) for row in x.unflatten(-1, (-1, count)).unflatten(-3, (-1, count)).unbind(-3)]


def by_token(solve, system, right):
    """Solves for several rows of every token at once; the system is interleaved."""
    rows = torch.stack(right, -2)
    return solve(system, rows.flatten(-3, -2)).unflatten(-2, rows.shape[-3:-1]).unbind(-2)


def interleave(scores, sigma):
    """G Sigma as one matrix [C r, C r] in the order of tokens, so that it stays triangular.

    scores: r rows of m matrices [t, s]; sigma: m rows of r numbers or factors [s] of their columns.
    """
    factors = [[x if isinstance(x, float) else x[..., None, :] for x in column] for column in zip(*sigma)]
    blocks = [[sum(g * x for g, x in zip(row, column)) for column in factors] for row in scores]
    return torch.stack([torch.stack(row, -1) for row in blocks], -3).flatten(-2).flatten(-3, -2)
