"""Versions of Triton and devices on which kernels of this kind are known to go wrong.

What is listed was reported publicly (numbers are issues of flash-linear-attention) or met in this project.
The known-answer run of ``ops/selfcheck.py`` is what protects a user; this list says what to expect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """Triton from ``first`` up to but not including ``fixed`` (None: no release is known to be right).

    ``architectures``: compute capabilities by major number, 0 for the interpreter; ``text``: what goes wrong.
    """

    first: Version
    fixed: Version | None
    architectures: tuple[int, ...]
    text: str


FAULTS = (
    Fault(
        (3, 4),
        (3, 7, 1),
        (9,),
        "gives wrong gradients of gates and keys where a product takes the transposed result of another one "
        "with a block of 64 keys (issue 640)",
    ),
    Fault(
        (3, 4),
        (3, 7, 1),
        (9,),
        "gives wrong gradients of the triangular transform with chunks of 64 and 4 warps (issue 984)",
    ),
    Fault(
        (3, 4),
        None,
        (9,),
        "has a ptxas (before 13.1) that makes products with constant places of their operands read elsewhere "
        "(Triton pull request 7196, Triton issue 11366); kernels that show it give way to other sizes",
    ),
    Fault((3, 6), (3, 7), (9,), "makes empty kernels of warp-specialised loops, which are not used here"),
    Fault(
        (3, 4),
        None,
        (10,),
        "gave misaligned addresses or silent NaN from 1024 programs on in one family of kernels (issue 913), "
        "and differing bits with 8 warps (issue 1228)",
    ),
    Fault((3, 7), (3, 8), (10,), "drops kernels whose products are in tf32x3; they are in ieee here"),
    Fault((3, 6), None, (0,), "multiplies bfloat16 operands wrongly; they are made float32 here"),
)


def known_faults(triton: str, architecture: int) -> tuple[str, ...]:
    """What is known to go wrong with this version on this major compute capability (0: the interpreter)."""
    version = tuple(int(n) for n in re.findall(r"\d+", triton.split("+")[0])[:3])
    return tuple(
        f.text
        for f in FAULTS
        if architecture in f.architectures and f.first <= version and (f.fixed is None or version < f.fixed)
    )
