"""Registers the modules that decode as torch operators that change the states they are given."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linalg_dsl.codegen.cache import load_module, module_key
from linalg_dsl.codegen.emit.names import Names, ascii_identifier
from linalg_dsl.codegen.emit.signature import output_dims, output_like, sized
from linalg_dsl.errors import InternalError
from linalg_dsl.ops.args import axis_sizes, check_widths
from linalg_dsl.ops.carried import carried_dims
from linalg_dsl.ops.decode_check import DecodeCheck
from linalg_dsl.ops.layout import turned
from linalg_dsl.ops.library import NAMESPACE, ModuleNumbers, plain_types
from linalg_dsl.ops.replay import Recorder, Replay
from linalg_dsl.planner.decode_form import DecodeForm

_LOCK = threading.RLock()
_REGISTERED: dict[str, DecodeOperator] = {}


def register_decode(
    form: DecodeForm, text: str, layout: str | None, exact: DecodeOperator | None
) -> DecodeOperator:
    """Loads the module with this text and registers its operator; once per text and layout in a process.

    ``exact``: the operator of the torch module, against which the first call on a device is checked.
    """
    base = ascii_identifier(form.spec.name)[:60]
    key = module_key(text)
    name = f"{base}_step_{key[:8]}{'' if layout is None else f'_{layout}'}"
    with _LOCK:
        found = _REGISTERED.get(name)
        if found is None:
            found = DecodeOperator(form, name, load_module(base, text), layout, exact)
            found.register()
            _REGISTERED[name] = found
        return found


class DecodeOperator:
    """``torch.ops.linalg_dsl.<name>``: inputs, states (changed), consts, slots, accepted, keep -> output."""

    def __init__(
        self,
        form: DecodeForm,
        name: str,
        module: ModuleType,
        layout: str | None,
        exact: DecodeOperator | None,
    ) -> None:
        spec = form.spec
        if tuple(module.INPUTS) != tuple(d.name for d in spec.inputs):
            raise InternalError(f"module {name} takes {module.INPUTS}")
        if len(module.STATES) != sum(map(len, form.parts)):
            raise InternalError(f"module {name} has the states {module.STATES}")
        self.form = form
        self.spec = spec
        self.name = name
        self.module = module
        self.layout = layout
        self.check = None if exact is None else DecodeCheck(form, module, exact.module)
        self.count, self.states = len(spec.inputs), len(spec.carried)
        self.dims = carried_dims(spec)
        self.numbers = ModuleNumbers(spec, module.CONSTS)

    def register(self) -> None:
        names = Names(reserved=("consts", "slots", "accepted", "keep"))
        tensors = [f"Tensor {names.unique(d.name)}" for d in self.spec.inputs]
        states = [f"state_{i}" for i in range(self.states)]
        changed = [f"Tensor(a{i}!) {names.unique(n)}" for i, n in enumerate(states)]
        operator = torch.library.custom_op(
            f"{NAMESPACE}::{self.name}",
            self.run,
            mutates_args=tuple(c.split()[1] for c in changed),
            schema=f"({', '.join([*tensors, *changed])}, float[] consts, Tensor? slots, Tensor? accepted, "
            "SymInt keep) -> Tensor",
        )
        operator.register_fake(self.fake)

    def run(self, *args: Any) -> Tensor:
        """The output of all tokens; the states are changed."""
        tensors, pool, (consts, slots, accepted, keep) = self._split(args)
        views = self.views(pool)
        self._look(tensors, views, slots, accepted)
        with plain_types(tensors[0]):
            numbers = self.numbers(tensors, consts)
            o: Tensor = self.module.step(tensors, views, numbers, slots, accepted, keep)
        return o

    def fake(self, *args: Any) -> Tensor:
        tensors, _, _ = self._split(args)
        sizes: dict[str, Any] = dict(axis_sizes(self.spec, tensors))
        first = next(x for x, d in zip(tensors, self.spec.inputs, strict=True) if d.timed)
        heads = max(x.shape[2 if d.timed else 0] for x, d in zip(tensors, self.spec.inputs, strict=True))
        dims = sized(output_dims(self.spec), dict(self.form.form.consts))
        shape = (*first.shape[:2], heads, *(sizes[d] if isinstance(d, str) else d for d in dims))
        return tensors[output_like(self.spec)].new_empty(shape)

    def record(
        self, leaves: Sequence[Tensor | None], places: Sequence[int], consts: Sequence[float], keep: int
    ) -> tuple[Tensor, Replay | None]:
        """Runs, and notes what is run; ``places``: which leaf each argument is, -1 for none."""
        given = [None if p < 0 else leaves[p] for p in places]
        # objects of their own: one tensor may be given twice here, and not in a call that is alike
        alone = [None if x is None else x.detach() for x in given]
        tensors = tuple(x for x in alone[: self.count] if x is not None)
        pool = [x for x in alone[self.count : self.count + self.states] if x is not None]
        views = self.views(pool)
        known = {id(x): (p, 0) for x, p in zip(alone, places, strict=True) if x is not None}
        at = 0
        for x, p, rows in zip(pool, places[self.count :], self.form.parts, strict=False):
            for view in views[at : at + len(rows)]:
                known[id(view)] = (p, view.data_ptr() - x.data_ptr())
            at += len(rows)
        slots, accepted = alone[-2:]
        self._look(tensors, views, slots, accepted)
        numbers = self.numbers(tensors, consts)
        with plain_types(tensors[0]), Recorder(known, len(leaves)) as recorder:
            o: Tensor = self.module.step(
                tensors, views, numbers, slots, accepted, keep, launch=recorder.launch
            )
        return o, recorder.replay((o,), tensors[0])

    # -----------------------------------------------------------------------------------------
    def views(self, pool: Sequence[Tensor]) -> list[Tensor]:
        """The states as the module takes them: axes as declared, shifted inputs row by row."""
        found: list[Tensor] = []
        for x, dims, rows in zip(pool, self.dims, self.form.parts, strict=True):
            x = turned(x, dims, self.layout)
            found += [x if row is None else x.select(2, row) for row in rows]
        return found

    def _look(
        self, tensors: tuple[Tensor, ...], views: list[Tensor], slots: Tensor | None, counts: Tensor | None
    ) -> None:
        if self.module.BACKEND == "triton":
            check_widths(self.spec, tensors)
        if self.check is not None:
            self.check(tensors, views, slots, counts)

    def _split(self, args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], list[Tensor], tuple[Any, ...]]:
        tensors = args[: self.count]
        return tensors, list(args[self.count : self.count + self.states]), args[self.count + self.states :]
