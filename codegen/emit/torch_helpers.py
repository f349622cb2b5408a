"""The functions that printed PyTorch statements call; a module holds those it uses."""

from __future__ import annotations

from collections.abc import Iterable

HELPERS: dict[str, tuple[tuple[str, ...], str]] = {
    "step": (
        (),
        '''
def step(a, b):
    """1 where a > b, 1/2 where they are equal, 0 elsewhere."""
    return (a > b).to(a.dtype) + (a == b).to(a.dtype) / 2
''',
    ),
    "side": (
        (),
        '''
def side(x):
    """-1 below 0, else 1."""
    return 1 - 2 * (x < 0).to(x.dtype)
''',
    ),
    "shifted": (
        (),
        '''
def shifted(x, dim):
    """x one token later, after a 1."""
    return torch.cat([torch.ones_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim)
''',
    ),
    "repeat": (
        (),
        '''
def repeat(x, dim, size):
    """x repeated along a new axis, which becomes axis dim."""
    x = x.unsqueeze(dim)
    return x.expand(*x.shape[:dim], size, *x.shape[dim:][1:])
''',
    ),
    "before": (
        (),
        '''
def before(x, dim):
    """At every token the sum over all earlier ones."""
    total = x.cumsum(dim)
    return torch.cat([torch.zeros_like(x.narrow(dim, 0, 1)), total.narrow(dim, 0, x.shape[dim] - 1)], dim)
''',
    ),
    "after": (
        ("before",),
        '''
def after(x, dim):
    """At every token the sum over all later ones."""
    return before(x.flip(dim), dim).flip(dim)
''',
    ),
    "since": (
        (),
        '''
def since(x, dim):
    """At every token the sum over itself and all later ones."""
    return x.flip(dim).cumsum(dim).flip(dim)
''',
    ),
    "pair_decay": (
        (),
        '''
def pair_decay(w, read):
    """[t, s]: exp(w_{s+1} + ... + w_t) for the pairs of a read, else 0. Sums only, so -inf is a reset.

    inclusive: s <= t. decayed: s < t. exclusive: s < t, and the interval ends at t - 1.
    """
    decay = w[..., None].expand(*w.shape, w.shape[-1]).tril(-1).cumsum(-2).exp()
    if read == "exclusive":
        return torch.nn.functional.pad(decay.tril(), (0, 0, 1, -1))
    return decay.tril(0 if read == "inclusive" else -1)
''',
    ),
    "span_sum": (
        ("since", "after", "before"),
        '''
def span_sum(pairs, read):
    """At every token the sum of the pairs [t, s] whose interval of decay holds it."""
    rows = after(pairs, -2) if read == "exclusive" else since(pairs, -2)
    return before(rows, -1).diagonal(dim1=-2, dim2=-1)
''',
    ),
    "channel_decay": (
        ("pair_decay",),
        '''
def channel_decay(w, read):
    """pair_decay of every channel: w [C, K] to [t, s, K]."""
    return pair_decay(w.mT, read).movedim(-3, -1)
''',
    ),
    "decayed_score": (
        ("channel_decay", "before", "after"),
        '''
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
''',
    ),
    "decay_apply": (
        ("channel_decay", "before", "after"),
        '''
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
''',
    ),
    "decay_apply_t": (
        ("channel_decay", "before", "after"),
        '''
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
''',
    ),
    "pair_gate": (
        ("channel_decay", "before", "after", "since"),
        '''
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
''',
    ),
    "substitute": (
        (),
        '''
def substitute(system, right):
    """U of U = right + system U by forward substitution; the system is strictly lower triangular."""
    return torch.linalg.solve_triangular(-system, right, upper=False, unitriangular=True)
''',
    ),
    "substitute_reversed": (
        (),
        '''
def substitute_reversed(system, right):
    """X of X = right + system^T X, from the last token to the first."""
    return torch.linalg.solve_triangular(-system.mT, right, upper=True, unitriangular=True)
''',
    ),
    "inverse": (
        ("substitute",),
        '''
def inverse(system):
    """(I - system)^-1 of a strictly lower triangular system."""
    return substitute(system, torch.eye(system.shape[-1], dtype=system.dtype, device=system.device))
''',
    ),
    "blocks": (
        (),
        '''
def blocks(x, count):
    """The count x count blocks [C, C] of a matrix whose rows and columns are in the order of tokens."""
    return [row.unbind(-1) for row in x.unflatten(-1, (-1, count)).unflatten(-3, (-1, count)).unbind(-3)]
''',
    ),
    "by_token": (
        (),
        '''
def by_token(solve, system, right):
    """Solves for several rows of every token at once; the system is interleaved."""
    rows = torch.stack(right, -2)
    return solve(system, rows.flatten(-3, -2)).unflatten(-2, rows.shape[-3:-1]).unbind(-2)
''',
    ),
    "interleave": (
        (),
        '''
def interleave(scores, sigma):
    """G Sigma as one matrix [C r, C r] in the order of tokens, so that it stays triangular.

    scores: r rows of m matrices [t, s]; sigma: m rows of r numbers or factors [s] of their columns.
    """
    factors = [[x if isinstance(x, float) else x[..., None, :] for x in column] for column in zip(*sigma)]
    blocks = [[sum(g * x for g, x in zip(row, column)) for column in factors] for row in scores]
    return torch.stack([torch.stack(row, -1) for row in blocks], -3).flatten(-2).flatten(-3, -2)
''',
    ),
}
"""name: (helpers it calls, source)."""


def helper_sources(used: Iterable[str]) -> tuple[str, ...]:
    """The sources of the used helpers and of those they call, in the order of this table."""
    need: set[str] = set()
    todo = list(used)
    while todo:
        name = todo.pop()
        if name not in need:
            need.add(name)
            todo.extend(HELPERS[name][0])
    return tuple(source.strip("\n") for name, (_, source) in HELPERS.items() if name in need)
