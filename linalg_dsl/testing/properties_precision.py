"""How many digits a type keeps: float32 at the nasty ends, short types against what their type costs."""

from __future__ import annotations

from math import inf

import torch

from linalg_dsl.testing.cases import run
from linalg_dsl.testing.compare import Excess, fail
from linalg_dsl.testing.draws import cases
from linalg_dsl.testing.failures import NotApplicable
from linalg_dsl.testing.floor import SINGLE, bounds, relative_errors
from linalg_dsl.testing.oracle import Oracle, exact
from linalg_dsl.testing.rounding import UNIT
from linalg_dsl.testing.subject import Subject

LEAST_SHORT = 2.0**-8
"""Below this no short type is measured: its outputs are rounded to eight bits."""


CHUNKS = 6.0
"""How many times the root mean square error of the chunk form's roundings is allowed."""


def _of_chunk_form(oracle: Oracle, name: str) -> float:
    """The relative L2 error to expect of the chunk form in float32."""
    size = float(oracle.want[name].norm())
    error = UNIT[torch.float32] * float(oracle.condition[name].norm())
    return error / size if size > 0 else inf


def precision(subject: Subject, *, seed: int = 0, examples: int = 12, budget_s: float = inf) -> None:
    """Float32 keeps every result within a relative L2 error of 5e-5, or twice that of the float32 step loop
    where that is larger; bfloat16 and float16 within twice their floor (``floor.chunk_floor``).

    Where the chunk form itself loses more (what has been erased inside a chunk is a difference of what it
    was; ``Oracle.condition`` measures that), no way to carry it out is asked for more digits than it has.
    """
    kinds = [d for d in subject.dtypes if d != torch.float64]
    if not kinds:
        raise NotApplicable(f"{subject.name} computes in float64 only")
    for i, kind in enumerate(kinds):
        share = examples // len(kinds) + 1
        drawn = cases(subject, seed=seed + 47 + i, examples=share, budget_s=budget_s / len(kinds), dtype=kind)
        for case in drawn:
            oracle = exact(case, gradients=True)
            want = oracle.want
            results = run(subject, case)
            errors = relative_errors(case, results, want)
            bound = SINGLE if kind == torch.float32 else 2 * LEAST_SHORT
            over = [n for n, e in errors.items() if not e <= bound]
            if not over:
                continue
            limits = bounds(case, want)
            for name in over:
                allowed = max(bound, limits[name][1])
                if errors[name] > allowed:
                    allowed = max(allowed, CHUNKS * _of_chunk_form(oracle, name))
                if not errors[name] <= allowed:
                    at = tuple(0 for _ in want[name].shape)
                    excess = Excess(name, at, errors[name], 0.0, allowed, errors[name] / allowed)
                    cause = (
                        f"digits are lost: got is the relative L2 error of {name}, beyond what its type costs"
                    )
                    raise fail(subject, "precision", case, excess, cause, results)
