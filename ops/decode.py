"""``op.step``: a few tokens of many sequences, their states read and updated in place.

The form behind it is one token of the whole recurrence (planner/decode_form.py), whatever its class: one
kernel on a GPU, a loop in plain PyTorch elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import BoundCall, bind, check_const_axes
from linalg_dsl.ops.artefacts import Passes
from linalg_dsl.ops.carried import carried_dims, check_states, given_states, start_states
from linalg_dsl.ops.decode_library import DecodeOperator, register_decode
from linalg_dsl.ops.layout import turn_all
from linalg_dsl.ops.reference import reference
from linalg_dsl.ops.replay import Key, ReplayCache, describe, is_plain
from linalg_dsl.ops.stage_op import Consts, constant
from linalg_dsl.ops.states import state_tuple

Backend = Any
"""``CompiledOp.backend_for``."""


class Decoder:
    """The steps of one recurrence; everything is made when it is first needed and kept."""

    def __init__(self, spec: RecurrenceSpec, options: CompileOptions, passes: Passes) -> None:
        self.spec = spec
        self.options = options
        self.state_type = state_tuple(spec)
        self.layout = options.state_layout
        self._passes = passes
        self._operators: dict[tuple[str, Consts], DecodeOperator] = {}
        self._prepared: dict[tuple[str | float, ...], DecodeOperator] = {}
        self._replays = ReplayCache()

    # -- the call -----------------------------------------------------------------------------
    def step(
        self,
        backend_for: Backend,
        args: Sequence[Tensor],
        kwargs: Mapping[str, Any],
        state: Any,
        slots: Tensor | None,
        accepted: Tensor | int | None,
    ) -> tuple[Tensor, Any]:
        """What ``CompiledOp.step`` says."""
        key: Key | None = None
        if is_plain() and not self.options.debug:
            leaves, key, addresses = self._leaves(args, kwargs, state, slots, accepted)
            if key is not None:
                replay = self._replays.get(key)
                if replay is not None:
                    return replay(leaves, addresses)[0], state
        if self.options.reverse:
            raise ArgumentError(f"{self.spec.name}: step runs from earlier to later tokens, and reverse=True")
        call = bind(self.spec, args, kwargs, None, None)
        _refuse_gradients(self.spec, (*call.tensors, *self._listed(state)))
        check_const_axes(self.spec, call.sizes, dict(call.consts))
        pool, state = self._states(call, state, slots)
        self._check_slots(call, pool, slots)
        keep, counts = self._accepted(call, accepted)
        device = call.tensors[0].device.type
        backend = backend_for(device, any(x.dtype == torch.float64 for x in call.tensors))
        if backend == "reference":
            return self._by_reference(call, pool, slots, counts, keep), state
        own = tuple((n, v) for n, v in call.consts)
        entry = (backend, *(word for pair in own for word in pair))
        name = self._prepare(*entry)
        numbers = [dict(own).get(c.name, math.nan) for c in self.spec.consts]
        if key is not None:
            operator = self._prepared[entry]
            if backend == "triton" and self._replays.is_due(key):
                o, replay = operator.record(
                    leaves, self._places(args, kwargs, pool, slots, counts), numbers, keep
                )
                self._replays.keep(key, replay)
                return o, state
            return operator.run(*call.tensors, *pool, numbers, slots, counts, keep), state
        registered = getattr(torch.ops.linalg_dsl, name)
        return registered(*call.tensors, *pool, numbers, slots, counts, keep), state

    def text(self, backend: str, consts: Consts = ()) -> str:
        """The text of the module that decodes."""
        if backend not in ("triton", "torch"):
            raise ArgumentError(f"source text exists for triton and torch, got {backend!r}")
        return self._passes.decode(self.spec, dict(consts), backend, self.options)[1]

    def operator(self, backend: str, consts: Consts = ()) -> DecodeOperator:
        """The registered operator of a backend with these consts fixed."""
        found = self._operators.get((backend, consts))
        if found is None:
            exact = None if backend == "torch" else self.operator("torch", consts)
            form, text = self._passes.decode(self.spec, dict(consts), backend, self.options)
            found = self._operators[backend, consts] = register_decode(form, text, self.layout, exact)
        return found

    @constant
    def _prepare(self, backend: str, *words: str | float) -> str:
        """The name of the operator for these consts (name, value, ...), registered by now."""
        key = (backend, *words)
        found = self._prepared.get(key)
        if found is None:
            consts = tuple((str(n), float(v)) for n, v in zip(words[::2], words[1::2], strict=True))
            # consts that a module takes as numbers need no specialisation of their own
            general = self.operator(backend)
            fixed = tuple((n, v) for n, v in consts if n not in general.module.CONSTS)
            found = self._prepared[key] = self.operator(backend, fixed) if fixed else general
        return found.name

    # -- arguments ----------------------------------------------------------------------------
    def _leaves(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        state: Any,
        slots: Any,
        accepted: Any,
    ) -> tuple[list[Tensor | None], Key | None, list[int]]:
        """The tensors of a call, what it is like (None for one that must be looked at), and addresses."""
        if isinstance(state, Tensor):
            states: tuple[Any, ...] = (state,)
        elif type(state) is self.state_type and all(x is not None for x in state):
            states = state
        else:
            return [], None, []
        leaves: list[Any] = [*args]
        words: list[object] = []
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                leaves.append(value)
                words.append(name)
            else:
                words.append((name, value))
        count: object = accepted
        if isinstance(accepted, Tensor):
            leaves.append(accepted)
            count = "counts"
        leaves += [*states, slots]
        found = describe(leaves)
        if found is None:
            return [], None, []
        # bools and 0.0 equal numbers of another kind
        return leaves, (found[0], len(args), tuple(words), type(accepted), count), found[1]

    def _places(
        self,
        args: Sequence[Tensor],
        kwargs: Mapping[str, Any],
        pool: Sequence[Tensor],
        slots: Tensor | None,
        counts: Tensor | None,
    ) -> list[int]:
        """Which leaf each argument of the operator is: inputs as declared, states, slots, accepted."""
        names = [d.name for d in self.spec.inputs]
        order = [*names[: len(args)], *(n for n, x in kwargs.items() if isinstance(x, Tensor))]
        places = [order.index(n) for n in names]
        at = len(order)
        of_counts = -1
        if counts is not None:
            of_counts, at = at, at + 1
        places += range(at, at + len(pool))
        return [*places, -1 if slots is None else at + len(pool), of_counts]

    def _listed(self, state: Any) -> list[Tensor]:
        values = (
            state.values() if isinstance(state, Mapping) else [state] if isinstance(state, Tensor) else state
        )
        return [x for x in values or () if isinstance(x, Tensor)]

    def _states(self, call: BoundCall, state: Any, slots: Tensor | None) -> tuple[list[Tensor], Any]:
        """The carried tensors as stored, started where they are not given; and what the caller gets back."""
        spec = self.spec
        given = given_states(spec, state, "state")
        missing = [n for n, x in zip(spec.carried, given, strict=True) if x is None]
        if missing and slots is not None:
            raise ArgumentError(
                f"{spec.name}: slots are rows of a pool, so state must hold {', '.join(missing)}"
            )
        sizes = dict(call.sizes)
        if slots is not None:
            first = next(x for x in given if x is not None)
            sizes["N"] = first.shape[0] if first.dim() else 0
        check_states(spec, given, sizes, call.tensors[0], "state", self.layout)
        for name, x in zip(spec.carried, given, strict=True):
            if x is not None and any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride(), strict=True)):
                raise ArgumentError(f"{spec.name}: state {name} is an expanded view; it is written in place")
        if not missing:
            return [x for x in given if x is not None], state
        # what is made here is contiguous as stored
        started = start_states(spec, sizes, call.tensors[0], self.layout)
        full = [s if x is None else x for x, s in zip(given, started, strict=True)]
        return full, full[0] if len(full) == 1 else self.state_type(*full)

    def _check_slots(self, call: BoundCall, pool: Sequence[Tensor], slots: Any) -> None:
        if slots is None:
            return
        name, batch = self.spec.name, call.sizes["B"]
        check_counts(name, "slots", slots, batch, call.tensors[0])
        if slots.device.type == "cpu" or self.options.debug:
            rows = pool[0].shape[0]
            if batch and not torch.compiler.is_compiling() and int(slots.max()) >= rows:
                raise ArgumentError(f"{name}: slots go up to {int(slots.max())}, the pool has {rows} rows")

    def _accepted(self, call: BoundCall, accepted: Any) -> tuple[int, Tensor | None]:
        """How many tokens count: a number for all sequences, or a tensor with one each."""
        length, name = call.sizes["T"], self.spec.name
        if accepted is None:
            return length, None
        if isinstance(accepted, int) and not isinstance(accepted, bool):
            if not 0 <= accepted <= length:
                raise ArgumentError(f"{name}: accepted is from 0 to n = {length}, got {accepted}")
            return accepted, None
        check_counts(name, "accepted", accepted, call.sizes["B"], call.tensors[0])
        return length, accepted

    def _by_reference(
        self, call: BoundCall, pool: Sequence[Tensor], slots: Tensor | None, counts: Tensor | None, keep: int
    ) -> Tensor:
        """Sequence by sequence with the step loop of the spec."""
        spec, dims = self.spec, carried_dims(self.spec)
        batch, length = call.sizes["B"], call.sizes["T"]
        declared = [x for x in turn_all(pool, dims, self.layout) if x is not None]
        rows = range(batch) if slots is None else [int(s) for s in slots]
        ends = [keep] * batch if counts is None else [min(max(int(c), 0), length) for c in counts]
        outputs: list[Tensor] = []
        for b, (row, end) in enumerate(zip(rows, ends, strict=True)):
            now = [x[max(row, 0)][None].clone() for x in declared]
            for count in {length, end}:
                tensors = {
                    d.name: x[b : b + 1, :count] if d.timed else x
                    for d, x in zip(spec.inputs, call.tensors, strict=True)
                }
                o, last = reference(
                    spec, tensors, initial_state=now, output_final_state=True, consts=dict(call.consts)
                )
                if count == length:
                    outputs.append(torch.zeros_like(o) if row < 0 else o)
                if count == end and end > 0 and row >= 0:
                    after = [last] if isinstance(last, Tensor) else list(last)
                    for x, new in zip(declared, after, strict=True):
                        x[row] = new[0].to(x.dtype)
        if not outputs:
            raise ArgumentError(f"{spec.name}: the reference backend steps at least one sequence")
        return torch.cat(outputs)


def check_counts(spec_name: str, name: str, x: Any, batch: int, like: Tensor) -> None:
    """A number per sequence: int32 or int64 [B] on the device of the inputs."""
    where = f"{spec_name}: {name}"
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"{where} must be an int32 or int64 tensor [B], got {kind}")
    if tuple(x.shape) != (batch,):
        raise ArgumentError(f"{where} must be [B] = ({batch},), got shape {tuple(x.shape)}")
    if x.device != like.device:
        raise ArgumentError(f"{where} is on {x.device}, expected {like.device} like the inputs")


def _refuse_gradients(spec: RecurrenceSpec, tensors: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ArgumentError(
            f"{spec.name}: step computes no gradients, as it updates states in place; call the op with "
            "initial_state for gradients, or step under torch.no_grad()"
        )
