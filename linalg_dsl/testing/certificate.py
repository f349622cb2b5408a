"""The numerics certificate of an op: its worst errors over seeded draws and nasty ends, and what is proved.

``op.check()`` and ``linalg-dsl check NAME`` make one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.check import CheckReport, CheckRow
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.rounding_floor import BITS, operand_error, rounding_floor
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.testing.cases import Case, Shape, make_case, run
from linalg_dsl.testing.compare import Excess, allowance, fail, least, ratios, spread
from linalg_dsl.testing.diagnose import likely_cause
from linalg_dsl.testing.draws import cases, tame
from linalg_dsl.testing.extremes import Extremes, applicable
from linalg_dsl.testing.failures import PropertyError
from linalg_dsl.testing.floor import bounds, chunk_floor, least_size, relative_errors, step_loop
from linalg_dsl.testing.oracle import Oracle, exact
from linalg_dsl.testing.properties_reference import check_case
from linalg_dsl.testing.replay import save_case
from linalg_dsl.testing.rounding import UNIT
from linalg_dsl.testing.shrink import smallest
from linalg_dsl.testing.subject import Subject

LENGTHS = (1, 4, 16, 64, 200)
STRENGTHS = ("zero", "tiny", "slow", "mild", "strong", "all strong", "very strong", "resets")


@dataclass(frozen=True, slots=True)
class CertificateRow(CheckRow):
    """The worst of one tensor over all draws.

    Relative L2 error and largest error over largest value as in ``CheckRow`` (``bound`` is 1: the row is
    within its bound where ``ratio``, the worst part of an element's allowance, is), ``ulps`` the largest
    error in units in the last place of the largest value of its row (at least a thousandth of that of the
    tensor), and where the ratio was met: seed, the case in words, index, got, expected. ``digits`` is the
    worst relative L2 error as a part of ``floor.bounds`` (5e-5 or twice the float32 step loop; twice the
    floor of a short type), ``yardstick`` the error of the float32 step loop, or the floor, at that draw; both
    are 0 in float64.
    """

    ratio: float = 0.0
    ulps: float = 0.0
    seed: int = 0
    case: str = ""
    index: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0
    digits: float = 0.0
    yardstick: float = 0.0

    @property
    def ok(self) -> bool:
        return self.ratio <= 1


@dataclass(frozen=True, slots=True)
class Certificate(CheckReport):
    """What was found over ``draws`` cases; prints as a table, and ``ok`` says whether nothing was wrong.

    ``proved`` are the plan's bounds of exponents and of the solve, ``chosen`` what it does for precision and,
    of a short type, the floor derived from the plan, ``curves`` rows of T, gates, error (the worst relative
    L2 of all results) and floor (what the type costs), ``cases`` the inputs in words, ``worst_case`` those
    that came nearest to, or furthest beyond, an allowance (``keep`` writes them), ``failure`` the smallest
    counterexample.
    """

    draws: int = 0
    proved: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    curves: tuple[dict[str, Any], ...] = ()
    cases: tuple[str, ...] = ()
    worst_case: Case | None = field(default=None, compare=False)
    failure: PropertyError | None = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        return self.failure is None and all(row.ok for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rows = [
            {
                "name": r.name, "l2": r.l2, "max": r.largest, "ulps": r.ulps, "of_allowed": r.ratio,
                "of_bound": r.digits, "yardstick": r.yardstick, "seed": r.seed, "case": r.case,
                "index": list(r.index), "got": r.got, "expected": r.expected, "ok": r.ok,
            }
            for r in self.rows if isinstance(r, CertificateRow)
        ]  # fmt: skip
        return {
            "recurrence": self.recurrence,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "draws": self.draws,
            "ok": self.ok,
            "rows": rows,
            "proved": list(self.proved),
            "precision": list(self.chosen),
            "curves": list(self.curves),
            "cases": list(self.cases),
            "worst_case": None if self.worst_case is None else str(self.worst_case),
            "failure": None if self.failure is None else self.failure.failure.as_dict(),
        }

    def keep(self, path: Path) -> Path:
        """Writes the worst input (the smallest failing one where something failed) for ``--replay``."""
        case = self.worst_case if self.failure is None else self.failure.details["case"]
        if not isinstance(case, Case):
            raise ArgumentError("nothing was drawn, so there is no worst input to keep")
        save_case(case, path)
        return path

    def figure(self) -> Any:
        """Errors over T and over the strength of the gates, beside what the type costs: a matplotlib
        ``Figure``. Raises ``ArgumentError`` where the certificate was made without curves."""
        from linalg_dsl.plots import error_panels

        if not self.curves:
            raise ArgumentError("the certificate has no curves to draw: it was made with curves=False")
        return error_panels(list(self.curves))

    def __str__(self) -> str:
        width = max(len(r.name) for r in self.rows)
        yardstick = "float32 loop" if self.dtype in ("float32", "float64") else "floor"
        lines = [
            f"{self.recurrence}: {self.backend} on {self.device}, {self.dtype}, worst of {self.draws} draws "
            "at ordinary and extreme inputs, against the float64 step loop",
            f"  {'':<{width}}  {'rel. L2':>9}  {'max':>9}  {'ulps':>8}  {'of allowed':>10}  "
            f"{yardstick:>12}  {'of bound':>8}  worst at",
        ]
        for r in self.rows:
            if isinstance(r, CertificateRow):
                verdict = f"seed {r.seed}" if r.ok else f"seed {r.seed} TOO LARGE"
                lines.append(
                    f"  {r.name:<{width}}  {r.l2:9.2e}  {r.largest:9.2e}  {r.ulps:8.3g}  {r.ratio:10.3f}  "
                    f"{r.yardstick:12.2e}  {r.digits:8.3f}  {verdict}"
                )
        lines += [f"  proved: {line}" for line in self.proved]
        lines += [f"  precision: {line}" for line in self.chosen]
        if self.curves:
            top = max(self.curves, key=lambda c: c["error"])
            lines.append(
                f"  over T and gates: at most {top['error']:.2e} (T {top['T']}, {top['gates']} gates), where "
                f"the type costs {top['floor']:.2e}"
            )
        if self.failure is not None:
            lines.append(str(self.failure))
        elif self.worst_case is not None:
            lines.append(f"  nearest to a bound: seed {self.worst_case.seed}, {self.worst_case}")
        return "\n".join(lines)


def certify(
    op: CompiledOp | Subject,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    draws: int = 24,
    seed: int = 0,
    budget_s: float = 12.0,
    curves: bool = True,
) -> Certificate:
    """The certificate over ``draws`` cases from ``seed`` on, fewer where ``budget_s`` seconds are over."""
    where = str(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    subject = op if isinstance(op, Subject) else Subject.of_op(op, dtypes=(dtype,), device=where)
    rows: dict[str, CertificateRow] = {}
    failure: PropertyError | None = None
    worst: tuple[float, Case | None] = (-1.0, None)
    count, drawn = 0, []
    for case in cases(subject, seed=seed, examples=draws, budget_s=budget_s, dtype=dtype):
        count += 1
        drawn.append(f"seed {case.seed}: {case}")
        oracle = exact(case, gradients=bool(subject.wanted))
        results = run(subject, case)
        allowed = {} if dtype == torch.float64 else bounds(case, oracle.want)
        found = {
            n: _against(_row(subject, case, oracle, n, x), *allowed.get(n, (0.0, inf)))
            for n, x in results.items()
        }
        for name, row in found.items():
            rows[name] = _merged(rows.get(name), row)
            if row.ratio > worst[0]:
                worst = row.ratio, case
        bad = max(found.values(), key=lambda r: r.ratio)
        if bad.ratio > 1 and failure is None:
            within = abs(bad.got - bad.expected) / bad.ratio
            excess = Excess(bad.name, bad.index, bad.got, bad.expected, within, bad.ratio)
            cause = likely_cause(subject, case, oracle, results)
            failure = smallest(subject, fail(subject, "check", case, excess, cause, results), check_case)
    kind = str(dtype).removeprefix("torch.")
    return Certificate(
        subject.spec.name,
        _backend(subject.op, where, dtype),
        where,
        kind,
        f"{count} draws",
        tuple(rows.values()),
        draws=count,
        proved=proved(subject.op),
        chosen=chosen(subject.op, dtype),
        curves=_curves(subject, dtype) if curves else (),
        cases=tuple(drawn),
        worst_case=worst[1],
        failure=failure,
    )


def _backend(op: CompiledOp | None, where: str, dtype: torch.dtype) -> str:
    return "foreign code" if op is None else op.backend_for(where.split(":")[0], dtype == torch.float64)


def proved(op: CompiledOp | None) -> tuple[str, ...]:
    """What the plan proves of exponents and of the solve, stage after stage; nothing for foreign code."""
    if op is None:
        return ()
    found = []
    for plan, stage in zip(op.plan.stages, op.stages.stages, strict=True):
        label = "" if op.stages.is_whole else f"{stage.spec.name}: "
        found += [f"{label}{line}" for line in getattr(plan.explain(), "stability", ())]
    return tuple(found)


def chosen(op: CompiledOp | None, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """What the plan does so that digits last, stage after stage; nothing for foreign code."""
    if op is None:
        return ()
    found = []
    kind = str(dtype).removeprefix("torch.")
    for plan, stage in zip(op.plan.stages, op.stages.stages, strict=True):
        label = "" if op.stages.is_whole else f"{stage.spec.name}: "
        found += [f"{label}{line}" for line in getattr(plan.explain(), "precision", ())]
        if kind in BITS and not isinstance(plan.artefacts.form, StepForm):
            floor = rounding_floor(plan.forward, plan.backward, kind)
            parts = ", ".join(f"{n} {x:.1e}" for n, x in floor.items())
            rho = operand_error(kind)
            found.append(
                f"{label}floor of {kind}, derived from {rho:.1e} an operand where nothing cancels: {parts}"
            )
    return tuple(found)


def _against(row: CertificateRow, yardstick: float, allowed: float) -> CertificateRow:
    return replace(row, digits=row.l2 / allowed, yardstick=yardstick)


def _row(subject: Subject, case: Case, oracle: Oracle, name: str, got: Tensor) -> CertificateRow:
    want = oracle.want[name]
    if want.numel() == 0:
        return CertificateRow(name, 0.0, 0.0, 1.0)
    wide = got.double()
    allowed = least(case, oracle, name)
    ratio = ratios(wide, want, allowed, got.dtype)
    if float(ratio.max()) > 1:
        allowed = allowance(subject, case, oracle, name)
        ratio = ratios(wide, want, allowed, got.dtype)
    at = tuple(int(i) for i in torch.unravel_index(ratio.reshape(-1).argmax(), ratio.shape))
    error = (wide - want).abs()
    l2 = relative_errors(case, {name: got}, oracle.want)[name]
    least_norm = least_size(case, oracle.want, name)
    largest = max(float(want.abs().max()), least_norm / want.numel() ** 0.5)
    top = float(error.max()) / largest
    last_place = 2 * UNIT[got.dtype] * spread(case, name, want, largest=True).clamp_min(1e-3 * largest)
    ulps = error / last_place
    return CertificateRow(
        name, l2, top, 1.0, None, float(ratio[at]), float(ulps.max()), case.seed, str(case), at,
        float(wide[at]), float(want[at]),
    )  # fmt: skip


def _merged(old: CertificateRow | None, new: CertificateRow) -> CertificateRow:
    """The worst of both, each figure for itself."""
    if old is None:
        return new
    base = new if not new.ratio <= old.ratio else old
    kept = new if not new.digits <= old.digits else old
    return replace(
        base, l2=max(old.l2, new.l2), largest=max(old.largest, new.largest), ulps=max(old.ulps, new.ulps),
        digits=kept.digits, yardstick=kept.yardstick,
    )  # fmt: skip


def _curves(subject: Subject, dtype: torch.dtype) -> tuple[dict[str, Any], ...]:
    """The worst relative L2 error over T, and over the strength of the gates, beside what the type costs."""
    gates = [g for g in STRENGTHS if g in applicable(subject.spec).get("gates", ("mild",))]
    K, V = (8, 8) if subject.sizes is None else subject.sizes[0]
    H = 1 if subject.heads is None else subject.heads[0]
    found = []
    for strength in gates:
        for T in LENGTHS if strength in ("mild", "slow") else LENGTHS[3:4]:
            case = make_case(subject, Shape(1, T, H, K, V), dtype=dtype, extremes=Extremes(gates=strength))
            if not tame(case):
                continue
            want = exact(case, gradients=bool(subject.wanted)).want
            errors = relative_errors(case, run(subject, case), want)
            if dtype in (torch.float32, torch.float64):
                floor = relative_errors(case, step_loop(case, dtype), want)
            else:
                floor = chunk_floor(case, want)
            found.append(
                {
                    "T": T,
                    "gates": strength,
                    "error": max(errors.values(), default=inf),
                    "floor": max(max(floor[n] for n in errors), UNIT[dtype]),
                }
            )
    return tuple(found)
