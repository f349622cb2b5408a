"""What tests of replayed calls share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from linalg_dsl.ops.replay import Replay


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever something is replayed."""
    calls: list[int] = []
    run = Replay.__call__

    def count(self: Replay, tensors: Any, addresses: Any) -> list[Tensor]:
        calls.append(1)
        return run(self, tensors, addresses)

    monkeypatch.setattr(Replay, "__call__", count)
    return calls


@contextmanager
def profiled() -> Iterator[None]:
    """A profiler hangs on Triton's own launches."""
    from triton import knobs

    def hook(metadata: Any) -> None:
        pass

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
