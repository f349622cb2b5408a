"""Without a GPU, Triton kernels run in its interpreter; fresh memory is filled with NaN everywhere.

With ``LINALG_DSL_GPU_DRY=1`` there is a stand-in for a GPU, on which its tests are walked (stand_in/dry.py).

Hypothesis has no deadline: the first example of a test often pays for an import or a compilation. In
continuous integration it draws the same examples every time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings
from stand_in import dry

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_SPILLS = r"ignore:\w+ with block .* spills \d+ registers; nothing near it spills less"
"""Which kernels these are is told in docs/measurements.md; here it is about their numbers."""

if dry.asked_for():
    os.environ.setdefault("LINALG_DSL_FIRST_USE", "0")  # there kernels are made as far as Triton's own form
    dry.start()
    dry.soften_asserts(pytest.register_assert_rewrite)
elif not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton


@pytest.fixture(scope="session", autouse=True)
def max_and_min_of_a_gpu() -> Iterator[None]:
    """In the interpreter too they drop NaN, unless a kernel asks for it."""
    if dry.asked_for() or torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    from gpu_arithmetic import drop_nan

    with pytest.MonkeyPatch.context() as patch:
        drop_nan(patch)
        yield


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN, so a value that nobody wrote is seen."""
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if dry.asked_for():
        dry.compare_nothing_in_helpers()
        for module in {item.getparent(pytest.Module) for item in items}:
            assert module is not None
            dry.make_smaller(module.obj)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings(_SPILLS))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
