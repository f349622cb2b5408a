"""Shapes that measurements are made at, by name, and the device as schedules see it."""

from __future__ import annotations

import torch

from linalg_dsl.codegen.targets import TARGETS, Target
from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.bench import Rates, Shape

SHAPES = {
    "train": Shape(8, 2048, 16, 128, 128),
    "long": Shape(1, 32768, 16, 128, 128),
    "d64": Shape(8, 4096, 16, 64, 64),
    "d256": Shape(4, 2048, 8, 256, 256),
    "mid": Shape(4, 4096, 16, 128, 128),
    "few": Shape(1, 131072, 4, 128, 128),
    "short": Shape(8, 256, 16, 128, 128),
    "small": Shape(1, 128, 8, 64, 64),
}
"""A training batch, few heads over long sequences, other head sizes, and calls that launches dominate."""
HEAD_SIZES = tuple(
    Shape(4, 4096, 16, key, value)
    for key, value in ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (128, 256))
)
"""One batch over head sizes."""


def shape_named(name: str) -> Shape:
    """Raises ``ArgumentError`` for a name that there is not."""
    try:
        return SHAPES[name]
    except KeyError:
        raise ArgumentError(f"shape: expected one of {', '.join(SHAPES)}, got {name!r}") from None


def target_of(device: torch.device, rates: Rates) -> Target | None:
    """The limits of a GPU, read now, with its measured bandwidth; None for another device."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    arch: int | str = found.gcnArchName.split(":")[0] if hip else 10 * found.major + found.minor
    name = str(arch) if hip else f"sm_{arch}"
    shared = getattr(found, "shared_memory_per_block_optin", 0) or TARGETS["gfx942"].shared
    warp = getattr(found, "warp_size", 32)
    units = found.multi_processor_count
    return Target(name, "hip" if hip else "cuda", arch, warp, shared, units, rates.bandwidth / 1e6)
