"""The checks behind ``linalg-dsl check`` and the demo."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

import linalg_dsl
from linalg_dsl.cli_output import Output
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.check import CheckReport

DTYPES = ("float64", "float32", "float16", "bfloat16")
CASES: tuple[dict[str, Any], ...] = (
    {"B": 1, "T": 1, "H": 1, "K": 1, "V": 1, "gates": "mild"},
    {"B": 2, "T": 100, "H": 3, "K": 16, "V": 24, "gates": "mild"},
    {"B": 1, "T": 130, "H": 2, "K": 20, "V": 12, "gates": "slow"},
    {"B": 1, "T": 65, "H": 2, "K": 3, "V": 7, "gates": "strong"},
    {"H": 2, "K": 16, "V": 16, "gates": "resets", "cu_seqlens": [0, 0, 37, 100, 100]},
)


@dataclass(frozen=True)
class Request:
    """Where and how to check; ``device`` None is a GPU if there is one."""

    backend: str = "auto"
    device: str | None = None
    dtype: str = "float32"
    seed: int = 0

    def torch_dtype(self) -> Any:
        import torch

        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}")
        return getattr(torch, self.dtype)

    def torch_device(self) -> Any:
        import torch

        try:
            device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise ArgumentError(f"device: {str(error).splitlines()[0]}") from None
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ArgumentError(
                f"device: there is no {device} here, {torch.cuda.device_count()} GPUs were found"
            )
        return device


def check_random(
    spec: RecurrenceSpec,
    request: Request,
    gates: str | None,
    sizes: Mapping[str, int],
    output: Output,
    draws: int = 0,
    keep: Path | None = None,
    plot: Path | None = None,
) -> bool:
    """Prints a report per case and, where no case is asked for, a certificate over ``draws`` inputs.

    Whether all errors are within bounds. ``keep`` is where the certificate's worst input goes, ``plot``
    its picture.
    """
    if keep is not None and (sizes or gates or not draws):
        raise ArgumentError("--keep keeps the worst input of a certificate: leave out sizes and --gates")
    op = compiled(spec, request, output)
    reports = []
    for case in _cases(gates, sizes):
        told = ", ".join(f"{k} {v}" for k, v in case.items())
        with output.working(f"checking {spec.name}: {told}"):
            report = op.check(
                dtype=request.torch_dtype(), device=request.torch_device(), seed=request.seed, **case
            )
        output.note(f"{report}\n")
        reports.append(report)
    if sizes or gates or not draws:
        return _conclude(reports, output)
    from linalg_dsl.testing.certificate import certify

    with output.working(f"certifying {spec.name}: {draws} inputs, ordinary and extreme"):
        found = certify(
            op, dtype=request.torch_dtype(), device=request.torch_device(), draws=draws, seed=request.seed
        )
    output.note(f"{found}\n")
    if plot is not None:
        from linalg_dsl import plots

        output.note(f"wrote {plots.save(found.figure(), plot)}")
    if keep is not None:
        output.note(f"kept the worst input in {found.keep(keep)}")
    return _conclude(reports, output, found)


def replay_case(spec: RecurrenceSpec, request: Request, path: Path, output: Output) -> bool:
    """Runs an input that was kept; whether it is within what is allowed."""
    op = compiled(spec, request, output)
    from linalg_dsl.testing.failures import PropertyError
    from linalg_dsl.testing.properties_reference import check_case
    from linalg_dsl.testing.replay import load_case
    from linalg_dsl.testing.subject import Subject

    case = load_case(spec, path)
    subject = Subject.of_op(op, dtypes=(case.dtype,), device=str(request.torch_device()))
    try:
        _, nearest = check_case(subject, case)
    except PropertyError as error:
        output.data({"ok": False, "failure": error.failure.as_dict()})
        output.note(str(error))
        return False
    told = "no elements" if nearest is None else f"{nearest.tensor}: {nearest.ratio:.3f} of what is allowed"
    output.data({"ok": True, "case": str(case), "nearest": told})
    output.note(f"{spec.name} is right at {case}\n  nearest to its bound is {told}")
    return True


LENGTHS = (16, 64, 256, 1024)
STRENGTHS = ("mild", "slow", "strong")


def check_over_lengths(
    spec: RecurrenceSpec, request: Request, sizes: Mapping[str, int], plot: Path, output: Output
) -> bool:
    """Checks over lengths and strengths of gates, and plots the largest error of each."""
    from linalg_dsl import plots

    if unused := set(sizes) & {"T"}:
        raise ArgumentError(f"--{min(unused)} has no meaning with --plot, which goes over lengths")
    op = compiled(spec, request, output)
    reports, points = [], []
    for gates in STRENGTHS:
        for length in LENGTHS:
            case = {"B": 1, "H": 2, **sizes, "T": length, "gates": gates}
            with output.working(f"checking {spec.name}: {gates} gates, T {length}"):
                report = op.check(
                    dtype=request.torch_dtype(), device=request.torch_device(), seed=request.seed, **case
                )
            worst = report.worst
            points.append({"T": length, "gates": gates, "error": worst.l2, "bound": worst.bound})
            reports.append(report)
    output.note(f"wrote {plots.save(plots.errors(points), plot)}")
    return _conclude(reports, output)


def check_on_text(
    spec: RecurrenceSpec,
    request: Request,
    path: Path,
    length: int,
    sizes: Mapping[str, int],
    output: Output,
) -> bool:
    """Prints the report of one run over the bytes of a file."""
    if unused := set(sizes) & {"B", "T"}:
        raise ArgumentError(f"--{min(unused)} has no meaning with --text; --length bounds the bytes used")
    try:
        text = path.read_bytes()[:length]
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error}") from None
    report = run_text(compiled(spec, request, output), request, text, sizes, output)
    output.note(f"{report}\n")
    return _conclude([report], output)


def run_text(op: Any, request: Request, text: bytes, sizes: Mapping[str, int], output: Output) -> CheckReport:
    """The op over a text, with a progress bar for the step loop that it is compared with."""
    from linalg_dsl.ops.text_run import check_text

    with Progress(console=output.messages, transient=True, disable=output.as_json) as bar:
        task = bar.add_task("step loop over the text", total=2 * len(text))
        return check_text(
            op,
            text,
            sizes.get("H", 2),
            sizes.get("K", 32),
            sizes.get("V", 32),
            dtype=request.torch_dtype(),
            device=request.torch_device(),
            seed=request.seed,
            progress=lambda tokens: bar.advance(task, tokens),
        )


def compiled(spec: RecurrenceSpec, request: Request, output: Output) -> Any:
    """The op; where Triton is asked for and no GPU is there, its interpreter is switched on."""
    request.torch_dtype()
    if request.backend == "triton" and request.torch_device().type == "cpu":
        if request.dtype == "bfloat16":
            raise ArgumentError("Triton's interpreter multiplies bfloat16 wrongly; use float32 or float16")
        if os.environ.setdefault("TRITON_INTERPRET", "1") == "1":
            output.note("no GPU: kernels run in Triton's interpreter, which is slow")
    return linalg_dsl.compile(spec, backend=request.backend)


def _cases(gates: str | None, sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    if sizes:
        yield {**sizes, "gates": gates or "mild"}
        return
    for case in CASES:
        yield {**case, "gates": gates or case["gates"]}


def _conclude(reports: list[CheckReport], output: Output, certificate: CheckReport | None = None) -> bool:
    every = reports if certificate is None else [*reports, certificate]
    good = all(report.ok for report in every)
    told: dict[str, Any] = {"ok": good, "reports": [report.as_dict() for report in reports]}
    if certificate is not None:
        told["certificate"] = certificate.as_dict()
    output.data(told)
    rows = [row for report in every for row in report.rows]
    failed = sum(not row.ok for row in rows)
    verdict = f"{failed} beyond their bound" if failed else "all within their bounds"
    output.note(f"{len(rows)} tensors compared with the step loop, {verdict}")
    return good
