"""Every function of a kernel, given a NaN."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from module_files import module_of_text

from linalg_dsl.codegen.emit.render import template_text
from linalg_dsl.codegen.emit.triton_statements import NAN, TILE_FUNCTIONS
from linalg_dsl.planner.evaluate_ops import UNARY

_CHOICES = {
    "power(b, 0.5)": torch.sqrt,
    "power(b, -1.5)": torch.rsqrt,
    f"tl.maximum(b, 0.5, {NAN})": torch.relu,
    f"tl.minimum(0.5, b, {NAN})": torch.relu,
    "bounded(b, tl.bfloat16)": torch.abs,
}
"""More texts, and what hands on NaN as they have to."""


def lost_nan(folder: Path, device: str) -> list[str]:
    """The functions that give NaN elsewhere than torch's do; their module is written to ``folder``."""
    cases = [(text.format("b"), UNARY[name]) for name, text in TILE_FUNCTIONS.items()]
    cases += _CHOICES.items()
    lines = [f"    tl.store(y + {i} * 16 + o, {text})\n" for i, (text, _) in enumerate(cases)]
    head = "\n\n@triton.jit\ndef functions(x, y):\n    o = tl.arange(0, 16)\n    b = tl.load(x + o)\n"
    module = module_of_text(
        folder, "functions_of_nan", template_text("tile_library.py") + head + "".join(lines)
    )
    x = torch.linspace(0.1, 2.0, 16, device=device)
    x[7] = math.nan
    y = torch.empty(len(lines), 16, device=device)
    module.functions[(1,)](x, y)
    return [
        text
        for row, (text, of_torch) in zip(y, cases, strict=True)
        if not torch.equal(row.isnan(), of_torch(x).isnan())
    ]
