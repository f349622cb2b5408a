"""Settings of the test run: hypothesis profiles, and which tests need a GPU."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# no deadline: the first example of a test often pays for an import or a compilation
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device"))
