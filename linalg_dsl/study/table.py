"""One table over many recurrences: class, cost, errors, times, recall."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.nn.mixer import compiled, spec_of
from linalg_dsl.study.costs import costs
from linalg_dsl.study.models import Size, build
from linalg_dsl.study.record import Record
from linalg_dsl.study.tasks import Recall
from linalg_dsl.study.timing import measure
from linalg_dsl.study.training import Recipe, train
from linalg_dsl.study.variants import Variant, parse_vary, variants

COLUMNS = (
    "variant", "class", "forward_flops", "backward_flops", "bytes", "state_bytes", "error", "bound",
    "forward_ms", "backward_ms", "memory_mb", "recall", "problem",
)  # fmt: skip
TASK = Recall(pairs=8, tellings=2, symbols=128)
"""The recall of the column: 8 keys, each told twice, in a state of 16 x 16."""
PLOTTED = {
    "recall": "recall of 8 pairs told twice",
    "forward_flops": "forward, FLOP per token and head",
    "state_bytes": "state, bytes per head",
    "error": "worst error of the certificate",
    "forward_ms": "forward, ms",
    "backward_ms": "backward, ms",
    "memory_mb": "memory of a training step, MiB",
}

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Sweep:
    """The rows of a sweep; prints as a table.

    Every row has the keys of ``COLUMNS`` (None where something was not asked or could not be said), ``text``,
    the spec, and ``ok``, whether its errors keep their bounds. FLOP and bytes are per token and head, bytes
    forward; ``error`` is the worst of the certificate's relative errors and ``bound`` what that one may be;
    ``problem`` says why a variant did not get further.
    """

    rows: tuple[dict[str, Any], ...]

    @property
    def ok(self) -> bool:
        """Whether every certificate that was asked for holds."""
        return all(r["ok"] is not False for r in self.rows)

    def columns(self) -> list[str]:
        """Those in which some row has something."""
        return [c for c in COLUMNS if any(r.get(c) is not None for r in self.rows)]

    def write_json(self, path: str | Path) -> Path:
        target = Path(path)
        target.write_text(json.dumps(list(self.rows), indent=1, ensure_ascii=False), encoding="utf-8")
        return target

    def write_csv(self, path: str | Path) -> Path:
        record = Record(None, {})
        record.rows = list(self.rows)
        return record.write_csv(path)

    def plot(self, folder: str | Path, ending: str = "png") -> list[Path]:
        """One bar chart for each column of numbers; needs matplotlib."""
        from linalg_dsl.plots import bars, save

        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = []
        for column, label in PLOTTED.items():
            values = {r["variant"]: float(r[column]) for r in self.rows if r.get(column) is not None}
            if values:
                paths.append(save(bars(values, label), Path(folder) / f"{column}.{ending}"))
        return paths

    def __str__(self) -> str:
        from linalg_dsl.cli_output import format_table

        return format_table(self.columns(), self.rows, 200, first_line_only=("problem",))


def sweep(
    base: Any,
    vary: str | Iterable[str] = (),
    *,
    B: int = 2,
    T: int = 2048,
    H: int = 8,
    K: int = 64,
    V: int = 64,
    dtype: str = "bfloat16",
    device: str | None = None,
    backend: str = "auto",
    check: bool = True,
    recall_steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Compares recurrences: a base spec under edits, a list of specs, or a folder of .rec files.

    ``base`` is what ``compile`` takes, a name of the catalogue, a list of these, or the ``Path`` of a folder;
    ``vary`` holds edits such as ``"gate: scalar, [K], exp(-softplus(a_t))"`` (``linalg_dsl.study.variants``),
    which apply to each. K, V, dtype are those of the costs, and with B, T, H of the times, which are taken
    where ``device`` (by default a GPU if there is one) is a GPU. ``check`` runs the certificate (float32,
    small sizes); ``recall_steps`` trains a one-layer model for so many steps on recall. ``out`` keeps rows
    in a JSON file as they come: a sweep that was interrupted goes on there, if its arguments are the same.
    ``progress(done, of, what)`` is called before every variant and after the last. A variant that cannot be
    compiled is a row with its ``problem``.
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = _dtype(dtype)
    sizes = {"B": B, "T": T, "H": H, "K": K, "V": V}
    settings = {
        **sizes,
        "dtype": dtype,
        "device": where,
        "backend": backend,
        "check": check,
        "recall_steps": recall_steps,
        "seed": seed,
    }
    record = Record(out, settings, strict=True)
    failed: list[dict[str, Any]] = []
    wanted = _variants(base, [vary] if isinstance(vary, str) else list(vary), failed)
    for i, (label, spec) in enumerate(wanted):
        if progress is not None:
            progress(i, len(wanted), label)
        if record.has(variant=label, text=str(spec)):
            continue
        row: dict[str, Any] = {"variant": label, **dict.fromkeys(COLUMNS[1:]), "ok": None, "text": str(spec)}
        try:
            _fill(row, spec, sizes, kind, where, backend, check, recall_steps, seed)
        except (ArgumentError, DslError, torch.OutOfMemoryError) as error:
            row["problem"] = str(error)
        record.add(row)
    if progress is not None:
        progress(len(wanted), len(wanted), "")
    order = {(label, str(spec)): i for i, (label, spec) in enumerate(wanted)}
    mine = [r for r in record.rows if (r["variant"], r["text"]) in order]
    return Sweep((*sorted(mine, key=lambda r: order[r["variant"], r["text"]]), *failed))


def _fill(
    row: dict[str, Any],
    spec: RecurrenceSpec,
    sizes: dict[str, int],
    dtype: torch.dtype,
    device: str,
    backend: str,
    check: bool,
    recall_steps: int | None,
    seed: int,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a class is slow stands in the row
        op = compiled(spec, backend)
    verdicts = [stage.verdict.partition(" → ")[0] for stage in op.plan.explain().stages]
    row["class"] = "; ".join(v.partition(": ")[2] if len(verdicts) == 1 else v for v in verdicts)
    counted = costs(op, sizes["K"], sizes["V"])
    row |= {k: round(v) for k, v in asdict(counted).items() if k in row}
    row |= {"bytes": round(counted.forward_bytes), "state_bytes": counted.state}
    if check:
        report = op.check(B=2, T=70, H=2, K=16, V=12, device=device, seed=seed)
        worst = report.worst
        row |= {"ok": report.ok, "error": max(worst.l2, worst.largest), "bound": worst.bound}
    if device.startswith("cuda"):
        row |= measure(op, **sizes, device=device, dtype=dtype)
    if recall_steps:
        row["recall"] = recall_score(spec, recall_steps, seed, device)


def recall_score(spec: RecurrenceSpec, steps: int, seed: int = 0, device: str = "cpu") -> float:
    """The accuracy of a one-layer model of the recurrence on ``TASK`` after so many steps of training."""
    model = build("mixer", Size(), TASK.vocab_size, seed, device, {"mixer": spec})
    recipe = Recipe(steps=steps, learning_rate=5e-3, seed=seed, stop_at=0.995)
    return train(model, TASK, recipe).accuracy


def _variants(
    base: Any, edits: Sequence[str], failed: list[dict[str, Any]]
) -> list[tuple[str, RecurrenceSpec]]:
    """Label and spec of every variant; combinations that are no spec become rows of ``failed``.

    Where that is all of them the first one's error is raised: it is the edit that is wrong.
    """
    errors: list[Exception] = []
    parsed = [parse_vary(text) for text in edits]

    def note(variant: Variant, error: Exception) -> None:
        errors.append(error)
        row: dict[str, Any] = {"variant": _label(variant, many), **dict.fromkeys(COLUMNS[1:]), "ok": None}
        failed.append({**row, "text": "", "problem": str(error)})

    bases = _bases(base)
    many = len(bases) > 1
    found = [(_label(v, many), v.spec) for spec in bases for v in variants(spec, parsed, note)]
    if errors and not found:
        raise errors[0]
    labels = [label for label, _ in found]
    return [
        (label if labels.count(label) == 1 else f"{label} ({labels[:i].count(label) + 1})", spec)
        for i, (label, spec) in enumerate(found)
    ]


def _label(variant: Variant, many: bool) -> str:
    if many and variant.choices:
        return f"{variant.spec.name}; {variant.label}"
    return variant.label


def _bases(base: Any) -> list[RecurrenceSpec]:
    if isinstance(base, Path) and base.is_dir():
        files = sorted(base.glob("*.rec"))
        if not files:
            raise ArgumentError(f"sweep: there is no .rec file in {base}")
        return [spec_of(file) for file in files]
    if isinstance(base, (list, tuple)):
        return [spec for one in base for spec in _bases(one)]
    return [spec_of(base)]


def _dtype(name: str) -> torch.dtype:
    found = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(name)
    if found is None:
        raise ArgumentError(f"sweep: dtype is bfloat16, float16 or float32, got {name!r}")
    return found
