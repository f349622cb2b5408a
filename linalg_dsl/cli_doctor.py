"""What this machine offers, and whether each backend works on it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from linalg_dsl.ops.check import CheckReport

Status = Literal["good", "note", "bad"]
TORCH_TO_TRITON = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; only a ``bad`` one makes the command fail."""

    what: str
    status: Status
    found: str


def examine() -> Iterator[Finding]:
    """The findings, cheap ones first; the last ones compile and run a recurrence."""
    yield Finding("linalg_dsl", "good", version("linalg_dsl"))
    yield Finding("python", "good", f"{platform.python_version()} ({sys.executable})")
    yield from _packages()
    yield from _devices()
    yield from _known_faults()
    yield _cache()
    yield _self_check()
    yield _backend("torch", "cpu")
    yield _triton()


def _packages() -> Iterator[Finding]:
    torch = _version("torch")
    triton = _version("triton")
    yield Finding("torch", "good", str(torch))
    if triton is None:
        wanted = "pip install 'linalg-dsl[triton]'" if sys.platform == "linux" else "Linux only"
        yield Finding("triton", "note", f"not installed ({wanted}); the torch backend works without it")
    else:
        pair = TORCH_TO_TRITON.get(".".join(str(torch).split(".")[:2]))
        fits = pair is None or triton.startswith(pair + ".")
        yield Finding(
            "triton",
            "good" if fits else "note",
            triton if fits else f"{triton}; torch {torch} is made for triton {pair}",
        )
    for package in ("sympy", "lark", "jinja2", "networkx"):
        found = _version(package)
        yield Finding(package, "good" if found else "bad", found or "not installed")


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("gpu", "note", "none; kernels run in Triton's interpreter (slow, for checking)")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        arch = getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}"
        yield Finding(f"gpu {index}", "good", f"{properties.name}, {arch}, {memory}")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    yield Finding(
        "C compiler",
        "good" if compiler else "bad",
        compiler or "none found; Triton builds its launchers with one (set CC)",
    )


def _known_faults() -> Iterator[Finding]:
    """What others or this project have seen go wrong with this Triton on the devices that are here."""
    import torch

    from linalg_dsl.codegen.known_faults import known_faults

    triton = _version("triton")
    if triton is None:
        return
    majors = {torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count())}
    if torch.version.hip is not None:
        majors = set()
    if os.environ.get("TRITON_INTERPRET") == "1":
        majors.add(0)
    for major in sorted(majors):
        where = f"sm_{major}x" if major else "its interpreter"
        found = known_faults(triton, major)
        for text in found:
            yield Finding("known fault", "note", f"triton {triton} on {where} {text}")
        if not found:
            yield Finding("known faults", "good", f"none of triton {triton} on {where}")


def _self_check() -> Finding:
    from linalg_dsl.codegen.cache import CacheError, records
    from linalg_dsl.ops.selfcheck import ENVIRONMENT_VARIABLE

    if os.environ.get(ENVIRONMENT_VARIABLE) == "0":
        return Finding("self-check", "note", f"switched off by {ENVIRONMENT_VARIABLE}=0")
    try:
        count = records()
    except (CacheError, OSError):
        count = 0
    return Finding(
        "self-check", "good", f"every kernel at its first use on a device; {count} passes noted in the cache"
    )


def _cache() -> Finding:
    from linalg_dsl.codegen.cache import CacheError, cache_directory

    try:
        directory = cache_directory()
    except (CacheError, OSError) as error:
        return Finding("cache", "bad", str(error))
    writable = os.access(directory, os.W_OK)
    return Finding(
        "cache", "good" if writable else "bad", f"{directory}{'' if writable else ' (not writable)'}"
    )


def _triton() -> Finding:
    import torch

    if _version("triton") is None:
        return Finding("triton backend", "note", "not available: triton is not installed")
    if torch.cuda.is_available():
        return _backend("triton", "cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        return Finding("triton backend", "note", "not run: no GPU; TRITON_INTERPRET=1 runs the interpreter")
    return _backend("triton", "cpu")


def _backend(backend: str, device: str) -> Finding:
    """Compiles the gated delta rule and compares it with the step loop, gradients included."""
    import linalg_dsl
    from linalg_dsl.ops.catalogue import catalogue_text

    what = f"{backend} backend"
    try:
        op = linalg_dsl.compile(catalogue_text("gated_delta_rule"), backend=backend)
        report = op.check(B=1, T=70, H=2, K=16, V=16, device=device)
    except Exception as error:  # whatever is wrong with this machine is what a doctor reports
        return Finding(what, "bad", f"{type(error).__name__}: {error}")
    return Finding(what, "good" if report.ok else "bad", _summary(report))


def _summary(report: CheckReport) -> str:
    where, worst = report.device, report.worst
    return f"{report.recurrence}, both ways on {where}: worst error {worst.l2:.1e} ({worst.name})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
