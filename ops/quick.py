"""Calls of a chunk or step class without gradients, replayed (ops/replay.py) past dispatcher and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import BoundCall, check_offsets_data
from linalg_dsl.ops.library import Operator, plain_types
from linalg_dsl.ops.replay import Key, Recorder, Replay, ReplayCache, current_stream, describe, is_plain
from linalg_dsl.planner.outputs import each


class QuickStage:
    """The forward runs of one stage. Of packed batches the offsets are one more tensor: tables are made of
    them by a kernel, so a replayed run follows what they hold now."""

    def __init__(self, spec: RecurrenceSpec) -> None:
        self.spec = spec
        self.cache = ReplayCache()

    def __call__(
        self,
        operator: Operator,
        given: Sequence[Tensor | None],
        numbers: Sequence[float],
        want: bool,
        offsets: Tensor | None = None,
    ) -> list[Tensor] | None:
        """The outputs, then the states if ``want``; None if this run is not one to be replayed."""
        found = prepared(given, numbers, want, offsets)
        if found is None:
            return None
        leaves, key, addresses = found
        replay = self.cache.get(key)
        if replay is not None:
            look(self.spec, leaves)
            return replay(leaves, addresses)
        if not self.cache.is_due(key):
            return None
        look(self.spec, leaves)
        results, replay = recorded(self.spec, operator, leaves, numbers, want, save=False)
        self.cache.keep(key, replay)
        return results


def prepared(
    given: Sequence[Tensor | None], numbers: Sequence[float], want: bool, offsets: Tensor | None
) -> tuple[list[Tensor | None], Key, list[int]] | None:
    """The leaves of a run, copied where they do not lie together, what it is alike in, and their addresses.

    None if it is not one to be replayed.
    """
    if not is_plain() or is_captured(given):
        return None
    with torch.no_grad():
        leaves = [None if x is None else x.contiguous() for x in (*given, offsets)]
        found = describe(leaves)
    return None if found is None else (leaves, stage_key(found[0], leaves, numbers, want), found[1])


def recorded(
    spec: RecurrenceSpec,
    operator: Operator,
    leaves: Sequence[Tensor | None],
    numbers: Sequence[float],
    want: bool,
    save: bool,
) -> tuple[list[Tensor], Replay | None]:
    """Of a forward: outputs, states if ``want``, what a backward takes if ``save``; and its recording."""
    own = alone(leaves)
    known = {id(x): (i, 0) for i, x in enumerate(own) if x is not None}
    count = len(spec.inputs)
    tensors = tuple(x for x in own[:count] if x is not None)
    consts = operator.numbers(tensors, numbers)
    with plain_types(tensors[0]), Recorder(known, len(leaves)) as recorder:
        o, states, residuals = operator.module.forward(
            tensors, tuple(own[count:-1]), consts, own[-1], want, save, launch=recorder.launch, handed=False
        )
    results = [*each(o), *(states or ()), *residuals]
    return results, recorder.replay(results, tensors[0])


def alone(leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Objects of their own: one tensor may be given twice here, and not in a call that is alike."""
    return [None if x is None else x.detach() for x in leaves]


def look(spec: RecurrenceSpec, leaves: Sequence[Tensor | None]) -> None:
    """Offsets on the CPU, the last of the leaves, are looked at in every call: what they hold may change."""
    offsets = leaves[-1]
    if offsets is not None and not offsets.is_cuda:
        length = next(
            x.shape[1] for x, d in zip(leaves, spec.inputs, strict=False) if d.timed and x is not None
        )
        check_offsets_data(spec.name, offsets, length)


def stage_key(described: Key, leaves: Sequence[Tensor | None], numbers: Sequence[float], want: bool) -> Key:
    """What a run is alike in; tables of a dense batch belong to the stream on which they were made."""
    given = tuple(None if x != x else x for x in numbers)
    return (described, given, want, _stream(leaves))


@dataclass(frozen=True, slots=True)
class _Known:
    """A call as a run of its only stage: the leaf that each of the stage's is (-1: none); what is copied."""

    replay: Replay
    order: tuple[int, ...]
    copies: tuple[int, ...]


class QuickCall:
    """The calls of an op of one stage: a call like an earlier one is not bound and checked again."""

    def __init__(self, spec: RecurrenceSpec, stage: QuickStage) -> None:
        self.spec = spec
        self.stage = stage
        self._known: dict[Key, _Known] = {}
        self.sure = all(s.start == 0 for s in spec.states)

    def describe(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        initial: Any,
        want: bool,
        offsets: Any = None,
        hints: tuple[object, ...] = (),
    ) -> tuple[list[Tensor | None], Key, list[int]] | None:
        """The tensors of a call, what it is like, and their addresses; None if it is to be looked at."""
        if not self.sure or not is_plain():
            return None
        words: list[object] = []
        leaves: list[Any] = [*args]
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                leaves.append(value)
                words.append(name)
            else:
                words.append((name, value, type(value)))
        if not all(x is None or isinstance(x, Tensor) for x in (initial, offsets)):
            return None
        leaves += [initial, offsets]
        found = describe(leaves)
        if found is None or len(leaves) == 2 or is_captured(leaves):
            return None
        key = (found[0], len(args), tuple(words), bool(want), _stream(leaves), hints)
        return leaves, key, found[1]

    def replay(
        self, leaves: Sequence[Tensor | None], key: Key, addresses: Sequence[int]
    ) -> list[Tensor] | None:
        known = self._known.get(key)
        if known is None:
            return None
        tensors = [None if i < 0 else leaves[i] for i in known.order]
        places = [0 if i < 0 else addresses[i] for i in known.order]
        for i in known.copies:
            x = tensors[i]
            assert x is not None
            tensors[i] = x.contiguous()
            places[i] = tensors[i].data_ptr()  # type: ignore[union-attr]
        if tensors[-1] is not None:
            look(self.spec, tensors)
        return known.replay(tensors, places)

    def learn(
        self,
        key: Key,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        call: BoundCall,
        numbers: Sequence[float],
        want: bool,
        offsets: Tensor | None = None,
    ) -> None:
        """Remembers how such a call is run, if its stage has a recording of it."""
        initial = call.initials[0]
        runs = [*call.tensors, initial, offsets]
        leaves = [None if x is None else x.contiguous() for x in runs]
        found = describe(leaves)
        if found is None:
            return
        replay = self.stage.cache.get(stage_key(found[0], leaves, numbers, want))
        if replay is None:
            return
        names = [d.name for d in self.spec.inputs]
        given = [*names[: len(args)], *(n for n, x in kwargs.items() if isinstance(x, Tensor))]
        order = [given.index(n) for n in names]
        order += [-1 if x is None else len(given) + i for i, x in enumerate((initial, offsets))]
        copies = [i for i, x in enumerate(runs) if x is not None and not x.is_contiguous()]
        if len(self._known) > 1024:
            self._known.clear()
        self._known[key] = _Known(replay, tuple(order), tuple(copies))


def quick_is_safe(options: CompileOptions) -> bool:
    """Whether calls with these options may pass by the checks of every call."""
    return (
        options.backend in ("auto", "triton")
        and not options.debug
        and options.state_layout is None
        and not options.tune
    )


def _stream(leaves: Sequence[Tensor | None]) -> int:
    x = next(x for x in leaves if x is not None)
    return current_stream(x.get_device()) if x.is_cuda else 0


def is_captured(leaves: Sequence[Tensor | None]) -> bool:
    """Whether the capture of a CUDA graph is under way, which makes its own tables."""
    x = next((x for x in leaves if x is not None), None)
    return x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing()
