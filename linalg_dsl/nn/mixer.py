"""A layer from a spec: everything that a recurrence wants, made from x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linalg_dsl.codegen.emit.signature import output_dims
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.nn import fused
from linalg_dsl.nn.initial import Maker, initial_param, settle
from linalg_dsl.nn.inputs import HeadInput, TokenInput
from linalg_dsl.nn.packing import Packing
from linalg_dsl.nn.roles import role_of
from linalg_dsl.ops.args import const_numbers

if TYPE_CHECKING:
    from linalg_dsl.language.builder import PythonRecurrence
    from linalg_dsl.ops.op import CompiledOp

Given = Mapping[str | tuple[str, ...], Callable[..., Any]]


_STEPPED = 4
"""The most tokens of a call that are decode steps."""


class MixerState(NamedTuple):
    """What a layer hands on: the recurrence's states [N, H, ...], and the convolutions' tails by input."""

    memory: tuple[Tensor, ...]
    tails: dict[str, Tensor]


class Mixer(nn.Module):
    """A sequence mixer around a recurrence: x [B, T, hidden_size] to the same shape.

    Every declared input is made from x by the choices that published layers agree on, decided from its
    declaration (docs/layers.md has the table); ``inputs={"g": module}`` replaces one by a callable from x
    to [B, T, heads, *dims], ``inputs={("c", "s"): module}`` several that come from one; a param's callable
    takes no argument.
    After the recurrence: an RMS norm per head, a gate silu(W x), a projection back.

    ``spec`` is all that ``compile`` takes, or a name of the catalogue. ``head_dim`` is K and
    ``value_dim`` V, both hidden_size / num_heads unless given. ``heads`` gives some inputs fewer heads than
    ``num_heads`` (a divisor; each is shared by neighbours, as in grouped-query attention). ``consts`` are
    the spec's. ``conv_size`` 0 leaves the short convolution out. ``fused``: on a GPU, kernels of their own
    for what lies around the recurrence (``linalg_dsl.nn.fused``). Parameters are drawn with torch's
    generator. Raises ``ArgumentError`` for arguments that do not fit, ``DslError`` for a wrong spec.
    """

    def __init__(
        self,
        spec: RecurrenceSpec | PythonRecurrence | str | Path,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        heads: Mapping[str, int] | None = None,
        consts: Mapping[str, float] | None = None,
        inputs: Given | None = None,
        conv_size: int = 4,
        output_norm: bool = True,
        output_gate: bool = True,
        norm_eps: float = 1e-5,
        fused: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.fused = spec_of(spec), fused
        where = f"Mixer of {self.spec.name}"
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads)):
            if size < 1:
                raise ArgumentError(f"{where}: {name} must be at least 1, got {size}")
        if (head_dim is None or value_dim is None) and hidden_size % num_heads:
            raise ArgumentError(
                f"{where}: hidden_size {hidden_size} is no multiple of num_heads {num_heads}; "
                "give head_dim and value_dim"
            )
        self.hidden_size, self.num_heads, self.conv_size = hidden_size, num_heads, conv_size
        self.head_dim = head_dim or hidden_size // num_heads
        self.value_dim = value_dim or hidden_size // num_heads
        self.op = compiled(self.spec, backend)
        self.consts = _checked_consts(self.spec, consts or {}, where)
        self.sizes = _sizes(self.spec, self.head_dim, self.value_dim, self.consts)
        self.heads = _checked_heads(self.spec, heads or {}, num_heads, where)
        self._options: dict[str, Any] = {
            "conv_size": conv_size, "output_norm": output_norm, "output_gate": output_gate,
            "norm_eps": norm_eps, "fused": fused, "backend": backend, "device": device, "dtype": dtype,
        }  # fmt: skip
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        makers = {d.name: self._maker(d, made) for d in self.spec.inputs}
        if not any(p.is_meta for m in makers.values() for p in m.parameters()):
            settle(self.spec, makers, self.sizes, self.consts)
        self.replaced = _replaced(self.spec, inputs or {}, where)
        taken = {n for names in self.replaced for n in names}
        self.inputs = nn.ModuleDict({_key((n,)): m for n, m in makers.items() if n not in taken})
        self._callables: dict[str, Callable[..., Any]] = {}
        for names, module in self.replaced.items():
            if isinstance(module, nn.Module):
                self.inputs[_key(names)] = module
            else:
                self._callables[_key(names)] = module
        dims = [d if isinstance(d, int) else self.sizes[d] for d in output_dims(self.spec)]
        self.width = int(torch.Size(dims).numel())
        total = num_heads * self.width
        self.norm = (
            nn.RMSNorm(self.width if self.width > 1 else total, norm_eps, **made) if output_norm else None
        )
        self.gate = nn.Linear(hidden_size, total, bias=False, **made) if output_gate else None
        self.out = nn.Linear(total, hidden_size, bias=False, **made)

    def _maker(self, decl: Input, made: Mapping[str, Any]) -> Maker:
        role = role_of(self.spec, decl)
        dims = [d if isinstance(d, int) else self.sizes[d] for d in decl.dims]
        heads = self.heads[decl.name]
        if decl.timed:
            return TokenInput(role, self.hidden_size, heads, dims, self.conv_size, **made)
        return HeadInput(role, heads, dims, initial_param(self.spec, decl, heads, dims), **made)

    # -- the call -------------------------------------------------------------------------------
    def forward(
        self,
        x: Tensor,
        state: MixerState | None = None,
        *,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        packing: Packing | None = None,
        in_place: bool = False,
    ) -> Any:
        """x [B, T, hidden_size] to y of the same shape; with ``return_state`` (y, ``MixerState``).

        ``state`` is that of an earlier call on what stood before x: calls in pieces, down to single tokens,
        give what one call gives. ``cu_seqlens`` [N + 1] packs N sequences into a batch of one (``packing`` is
        the same, prepared once for many layers); states then have N rows. Up to four tokens after a state
        go through ``op.step`` where no gradients are recorded; with ``in_place`` that overwrites the
        recurrence's part of ``state`` instead of a copy.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ArgumentError(
                f"Mixer of {self.spec.name}: x must be [B, T, {self.hidden_size}], got shape {tuple(x.shape)}"
            )
        if packing is None and cu_seqlens is not None:
            packing = Packing.of(cu_seqlens, x.shape[1], cu_seqlens_cpu)
        projected = self._project(x)
        gate = projected.pop("", None)
        values, tails = self.make_inputs(x, state.tails if state else {}, packing, projected)
        few = packing is None and 0 < x.shape[1] <= _STEPPED
        if state is not None and return_state and few and not torch.is_grad_enabled():
            memory = state.memory if in_place else tuple(s.clone() for s in state.memory)
            given: dict[str, Any] = {"state": memory, **self.consts}
            o, _ = self.op.step(*(values[d.name] for d in self.spec.inputs), **given)
            return self.read_out(o, x, gate), MixerState(memory, tails)
        result = self.op(
            *(values[d.name] for d in self.spec.inputs),
            initial_state=state.memory if state else None,
            output_final_state=return_state,
            cu_seqlens=packing.cu_seqlens if packing else None,
            cu_seqlens_cpu=packing.cu_seqlens_cpu if packing else None,
            **self.consts,
        )
        if not return_state:
            return self.read_out(result, x, gate)
        o, last = result
        return self.read_out(o, x, gate), MixerState(
            (last,) if isinstance(last, Tensor) else tuple(last), tails
        )

    def _project(self, x: Tensor) -> dict[str, Tensor]:
        """What projections from x give, by input, and of the gate under ""; nothing unless fused."""
        if not self.fused or not fused.applies(x):
            return {}
        found = {n: m.project for n, m in self.inputs.items() if isinstance(m, TokenInput) and m.down is None}
        linears = {**found, **({} if self.gate is None else {"": self.gate})}
        return dict(zip(linears, fused.project(x, [m.weight for m in linears.values()]), strict=True))

    def make_inputs(
        self,
        x: Tensor,
        tails: Mapping[str, Tensor] | None = None,
        packing: Packing | None = None,
        projected: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Every declared input and param by name, and the convolutions' new tails."""
        before, after = tails or {}, {}
        given, fuse = projected or {}, self.fused and fused.applies(x)
        values: dict[str, Tensor] = {}
        for decl in self.spec.inputs:
            match dict(self.inputs.items()).get(_key((decl.name,))):
                case TokenInput() as module:
                    key = _key((decl.name,))
                    values[decl.name], tail = module(x, before.get(decl.name), packing, given.get(key), fuse)
                    if tail is not None:
                        after[decl.name] = tail
                case HeadInput() as param:
                    values[decl.name] = param()
        for names in self.replaced:
            key = _key(names)
            make = self.inputs[key] if key in self.inputs else self._callables[key]
            found = make(x) if self.spec.input(names[0]).timed else make()
            many = found if len(names) > 1 else (found,)
            if len(many) != len(names):
                raise ArgumentError(f"the module for {', '.join(names)} gave {len(many)} tensors")
            values |= zip(names, many, strict=True)
        return values, after

    def read_out(self, o: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Norm, gate (``gate``: its projection) and projection of the recurrence's output [B, T, H, ...]."""
        o = o.reshape(*x.shape[:2], self.num_heads, self.width)
        if gate is not None and self.norm is not None and self.width > 1:
            eps = cast(float, self.norm.eps)
            return cast(Tensor, self.out(fused.norm_and_gate(o, gate, self.norm.weight, eps)))
        if self.norm is not None:
            o = self.norm(o.to(x.dtype)) if self.width > 1 else self.norm(o.flatten(2).to(x.dtype))
        o = o.flatten(2).to(x.dtype) if o.dim() == 4 else o
        if self.gate is not None:
            o = o * F.silu(self.gate(x) if gate is None else gate)
        return cast(Tensor, self.out(o))

    # -- sharding -------------------------------------------------------------------------------
    def head_axes(self) -> dict[str, int | None]:
        """For every parameter the axis along which its heads lie, one after the other; None: shared."""
        axes: dict[str, int | None] = {}
        for name, _ in self.named_parameters():
            parts = name.split(".")
            if parts[0] == "out":
                axes[name] = 1
            elif parts[0] == "norm" or "down" in parts:
                axes[name] = None
            else:
                axes[name] = 0
        return axes

    def shard(self, index: int, count: int) -> Mixer:
        """The layer with the heads of one of ``count`` tensor-parallel ranks.

        The sum of what all ranks give is what the whole layer gives: one all-reduce per layer, none
        inside. Raises ``ArgumentError`` where heads do not divide, or inputs were replaced (those are yours
        to shard).
        """
        where = f"Mixer of {self.spec.name}"
        if self.replaced:
            raise ArgumentError(
                f"{where}: replaced inputs ({_key(next(iter(self.replaced)))}) cannot be sharded"
            )
        if self.width == 1 and self.norm is not None:
            raise ArgumentError(
                f"{where}: its output norm spans the heads, as the output is one number per head"
            )
        if not 0 <= index < count:
            raise ArgumentError(f"{where}: shard {index} of {count}")
        for name, h in {**self.heads, "num_heads": self.num_heads}.items():
            if h % count:
                raise ArgumentError(f"{where}: {name} has {h} heads, which {count} ranks do not divide")
        part = Mixer(
            self.spec, self.hidden_size, self.num_heads // count, head_dim=self.head_dim,
            value_dim=self.value_dim, heads={n: h // count for n, h in self.heads.items()},
            consts=self.consts, **self._options | {"device": "meta"},
        )  # fmt: skip
        part._options["device"] = self._options["device"]
        axes = self.head_axes()
        own = self.state_dict()
        sliced = {
            n: x if axes[n] is None else x.chunk(count, dim=axes[n])[index].clone() for n, x in own.items()
        }
        part.load_state_dict(sliced, assign=True)
        for p in part.parameters():
            p.requires_grad_()
        return part

    def extra_repr(self) -> str:
        return f"{self.spec.name}, heads={self.num_heads}, K={self.head_dim}, V={self.value_dim}"


def spec_of(given: Any) -> RecurrenceSpec:
    """The spec behind what a user gave: all that ``compile`` takes, or a name of the catalogue."""
    from linalg_dsl.driver import read_spec
    from linalg_dsl.ops.catalogue_functions import catalogue_function

    if isinstance(given, str) and "\n" not in given and given.isidentifier():
        return catalogue_function(given).spec
    return read_spec(given)


@lru_cache(maxsize=256)
def compiled(spec: RecurrenceSpec, backend: str) -> CompiledOp:
    """One op for all layers of a model."""
    import linalg_dsl

    return linalg_dsl.compile(spec, backend=backend)


def _key(names: tuple[str, ...]) -> str:
    return "+".join(names)


def _sizes(spec: RecurrenceSpec, key: int, value: int, consts: Mapping[str, float]) -> dict[str, int]:
    sizes = {"K": key, "V": value}
    numbers = const_numbers(spec, sizes, consts)
    every = (*(i.dims for i in spec.inputs), *(s.dims for s in spec.states))
    dims = {d for axes in every for d in axes if isinstance(d, str)}
    return sizes | {d: int(numbers[d]) for d in dims if d in numbers}


def _checked_consts(spec: RecurrenceSpec, given: Mapping[str, float], where: str) -> dict[str, float]:
    known = [c.name for c in spec.consts]
    if unknown := [n for n in given if n not in known]:
        has = f"its consts are {', '.join(known)}" if known else "it has none"
        raise ArgumentError(f"{where}: there is no const {unknown[0]!r}; {has}")
    return dict(given)


def _checked_heads(spec: RecurrenceSpec, few: Mapping[str, int], most: int, where: str) -> dict[str, int]:
    names = [d.name for d in spec.inputs]
    if unknown := [n for n in few if n not in names]:
        raise ArgumentError(f"{where}: heads names {unknown[0]!r}; the inputs are {', '.join(names)}")
    for name, count in few.items():
        if count < 1 or most % count:
            raise ArgumentError(f"{where}: {name} has {count} heads, which does not divide num_heads {most}")
    found = {n: few.get(n, most) for n in names}
    if max(found.values()) < most:
        raise ArgumentError(f"{where}: no input has num_heads = {most} heads")
    return found


def _replaced(spec: RecurrenceSpec, given: Given, where: str) -> dict[tuple[str, ...], Callable[..., Any]]:
    names = [d.name for d in spec.inputs]
    found: dict[tuple[str, ...], Callable[..., Any]] = {}
    for key, module in given.items():
        group = (key,) if isinstance(key, str) else tuple(key)
        for name in group:
            if name not in names:
                raise ArgumentError(f"{where}: inputs names {name!r}; it has {', '.join(names)}")
            if any(name in other for other in found):
                raise ArgumentError(f"{where}: {name} is made twice")
        if len({spec.input(n).timed for n in group}) > 1:
            raise ArgumentError(f"{where}: {', '.join(group)}: inputs and params cannot come from one module")
        if not callable(module):
            raise ArgumentError(f"{where}: inputs[{key!r}] must be callable, got {type(module).__name__}")
        found[group] = module
    return found
