"""Checks code that was not made here: PyTorch of one's own and, if it is there, flash-linear-attention's.

    python examples/check_foreign_kernels.py

The line says what the code should compute; the same properties are run as for generated kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl.testing import Report, Subject, run_properties

SPEC = ld.parse(
    """recurrence simple_gla
input q, k : [K]
input v : [V]
input g : log gate
const scale = 1 / sqrt(K)
S_t = exp(g_t) S_{t-1} + k_t v_tᵀ
o_t = scale S_tᵀ q_t
"""
)


def parallel_form(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """All tokens at once. Exponents are sums over intervals, formed by adding, so a reset is no NaN."""
    T = q.shape[1]
    steps = g.transpose(1, 2)[..., None].expand(-1, -1, -1, T)  # [B, H, t, s]: what token t adds
    decay = steps.tril(-1).cumsum(-2).exp().tril()
    scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhts,bshv->bthv", scores * decay, v)


def with_a_fault(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The same with the gate of the token before: an exclusive sum where an inclusive one belongs."""
    return parallel_form(q, k, v, torch.cat([g[:, :1] * 0, g[:, :-1]], 1))


def check_own(budget_s: float) -> tuple[Report, Report]:
    """The reports of the right code and of the faulty one."""
    right = Subject.of_callable(parallel_form, SPEC, dtypes=(torch.float64, torch.float32))
    wrong = Subject.of_callable(with_a_fault, SPEC, dtypes=(torch.float64,))
    only = ["matches_reference", "causality", "finite_differences", "linearity"]
    return (
        run_properties(right, budget_s=budget_s),
        run_properties(wrong, only=only, budget_s=budget_s, stop_at_first=True),
    )


def fla_subject() -> Subject | None:
    """flash-linear-attention's operator for the same line; None where it, or a GPU, is missing."""
    if not torch.cuda.is_available():
        return None
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError:
        return None
    return Subject.of_callable(
        chunk_simple_gla,
        SPEC,
        initial_state=True,
        final_state=True,
        packed=True,
        dtypes=(torch.bfloat16,),
        precision=torch.bfloat16,
        sizes=((64, 64), (128, 128)),
        heads=(1, 2, 4),
        device="cuda",
        bitwise=True,
    )


def main(budget_s: float = 30.0) -> tuple[Report, Report]:
    """Prints a report for each."""
    right, wrong = check_own(budget_s)
    print(right)
    print(wrong)
    theirs = fla_subject()
    if theirs is None:
        print("flash-linear-attention, or a GPU for it, is not here")
    else:
        print(run_properties(theirs, budget_s=budget_s))
    return right, wrong


if __name__ == "__main__":
    main()
