"""``linalg-dsl demo``: one recurrence from its line of mathematics to kernels checked on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import linalg_dsl
from linalg_dsl.cli_check import Request, run_text
from linalg_dsl.cli_compile import write_modules
from linalg_dsl.cli_output import Output, load_spec
from linalg_dsl.errors import ArgumentError

NAME = "gated_delta_rule"
LENGTH = 4096
CASES = (
    {"B": 2, "T": 100, "H": 2, "K": 16, "V": 24, "gates": "mild"},
    {"H": 2, "K": 16, "V": 16, "gates": "resets", "cu_seqlens": [0, 37, 37, 100]},
)
LARGE = {"B": 2, "T": 1000, "H": 3, "K": 100, "V": 60, "gates": "mild"}


def run_demo(text: Path | None, folder: Path, output: Output) -> bool:
    """Prints every step; whether all checks passed."""
    began = time.perf_counter()
    device, backends = _machine(output)
    spec = load_spec(NAME)

    output.heading("1. the recurrence")
    output.note(str(spec).rstrip())

    output.heading("2. its derivation")
    op = linalg_dsl.compile(spec)
    output.note(str(op.plan.explain()))

    output.heading("3. generated code")
    for path in write_modules(op, folder):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        output.note(f"wrote {path}, {lines} lines")

    good = True
    output.heading("4. compared with the step loop in float64, output, state and every gradient")
    for backend in backends:
        compiled = linalg_dsl.compile(spec, backend=backend)
        for case in (*CASES, *([LARGE] if device == "cuda" else [])):
            with output.working(f"checking the {backend} backend on {device}"):
                report = compiled.check(device=device, **case)
            output.note(f"{report}\n")
            good &= report.ok

    sample = text or _readme()
    content = _read(sample)[:LENGTH]
    output.heading(f"5. a run over {sample.name}, {len(content)} bytes through a fixed embedding")
    backend = backends[0]
    compiled = linalg_dsl.compile(spec, backend=backend)
    sizes = {"H": 1, "K": 32, "V": 32}
    report = run_text(compiled, Request(backend, device), content, sizes, output)
    output.note(f"{report}\n")
    good &= report.ok

    took = time.perf_counter() - began
    output.heading("next")
    output.note(f"{'all checks passed' if good else 'A CHECK FAILED'}, {took:.0f} s")
    output.note(
        "  source .venv/bin/activate                    puts linalg-dsl and python on the path\n"
        "  linalg-dsl list                              the other recurrences\n"
        "  linalg-dsl explain kda --K 128 --V 128       another derivation, with its costs\n"
        "  linalg-dsl check my_recurrence.rec           your own line, checked\n"
        "  python examples/walkthrough.py               every stage of a compilation\n"
        "  python examples/reluctant_delta.py           an operator of our own, trained"
    )
    return good


def _machine(output: Output) -> tuple[str, list[str]]:
    """The device, and the backends to show on it: without a GPU kernels run in the interpreter."""
    import torch

    if torch.cuda.is_available():
        output.note(f"on {torch.cuda.get_device_name()}")
        return "cuda", ["triton"]
    try:
        import importlib.util

        has_triton = importlib.util.find_spec("triton") is not None
    except ValueError:
        has_triton = False
    if not has_triton:
        output.note("no GPU and no triton: the PyTorch module is checked, the kernels are only written")
        return "cpu", ["torch"]
    os.environ.setdefault("TRITON_INTERPRET", "1")
    output.note("no GPU: kernels are checked in Triton's interpreter")
    return "cpu", ["triton", "torch"]


def _readme() -> Path:
    beside = Path(__file__).resolve().parent.parent / "README.md"
    here = Path("README.md")
    for path in (here, beside):
        if path.is_file():
            return path
    raise ArgumentError("there is no README.md here; give a text with --text FILE")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error}") from None
