"""Cases on disk: the inputs of a failure, to be run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.testing.cases import Case, Shape
from linalg_dsl.testing.extremes import Extremes

FORMAT = 1


def save_case(case: Case, path: Path) -> None:
    """Writes tensors, states and cotangents; ``load_case`` with the same spec gives the case back."""
    s = case.shape
    data: dict[str, Any] = {
        "format": FORMAT,
        "name": case.spec.name,
        "shape": [s.B, s.T, s.H, s.K, s.V],
        "lengths": None if s.lengths is None else list(s.lengths),
        "seed": case.seed,
        "extremes": [case.extremes.gates, case.extremes.keys, case.extremes.scalars, case.extremes.values],
        "cotangents": case.cotangents,
        "tensors": dict(case.tensors),
        "states": dict(case.states),
        "weights": dict(case.weights),
        "consts": dict(case.consts),
        "heads": dict(case.heads),
        "with_state": case.with_state,
    }
    torch.save(data, path)


def load_case(spec: RecurrenceSpec, path: Path) -> Case:
    """The case in a file. Raises ``ArgumentError`` where it is none, or one of another recurrence."""
    try:
        data = torch.load(path, weights_only=True)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("it holds something else")
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error}") from None
    except Exception as error:
        raise ArgumentError(f"{path} is no saved case: {str(error).splitlines()[0]}") from None
    names = [d.name for d in spec.inputs]
    if list(data["tensors"]) != names:
        raise ArgumentError(
            f"{path} was saved for {data['name']} with the inputs {', '.join(data['tensors'])}; "
            f"{spec.name} has {', '.join(names)}"
        )
    lengths = data["lengths"]
    dtype = next(iter(data["tensors"].values())).dtype
    B, T, H, K, V = data["shape"]
    shape = Shape(B, T, H, K, V, None if lengths is None else tuple(lengths))
    case = Case(
        spec,
        shape,
        dtype,
        data["seed"],
        Extremes(*data["extremes"]),
        data["cotangents"],
        data["tensors"],
        data["states"],
        data["consts"],
        data["heads"],
        data["with_state"],
    )
    case.weights.update(data["weights"])
    return case
