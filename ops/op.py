"""The compiled recurrence: what a user calls."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from linalg_dsl.codegen.cache import load_module
from linalg_dsl.codegen.emit.names import ascii_identifier, ascii_text
from linalg_dsl.codegen.emit.pipeline import emit_pipeline
from linalg_dsl.codegen.emit.signature import output_like
from linalg_dsl.codegen.extract import part_of
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.errors import ArgumentError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import (
    RESERVED,
    BoundCall,
    bind,
    check_const_axes,
    check_offsets_data,
    const_numbers,
)
from linalg_dsl.ops.artefacts import Artefacts, Module, Passes, stage_options
from linalg_dsl.ops.carried import all_started, carried_dims
from linalg_dsl.ops.decode import Decoder
from linalg_dsl.ops.layout import turn_all
from linalg_dsl.ops.library import Operator
from linalg_dsl.ops.plan_view import Plan, StagePlan
from linalg_dsl.ops.pool import call_with_pool, new_state
from linalg_dsl.ops.positions import call_at_positions
from linalg_dsl.ops.promises import check_promises
from linalg_dsl.ops.quick import QuickCall, quick_is_safe
from linalg_dsl.ops.reference import reference
from linalg_dsl.ops.sharded import is_sharded, run_sharded
from linalg_dsl.ops.stage_op import Consts, Rounding, StageOp, States, constant
from linalg_dsl.ops.states import state_tuple
from linalg_dsl.ops.transforms import refuse_transforms
from linalg_dsl.planner.stages import Stages, single

if TYPE_CHECKING:
    from linalg_dsl.ops.check import CheckReport
    from linalg_dsl.ops.tuned import Tuner


_ONE_CASE = frozenset({"B", "T", "H", "K", "V", "gates", "heads", "cu_seqlens", "consts"})


class CompiledOp:
    """A recurrence as a torch operator, with gradients for every input, param and the initial state.

    Call it with the declared tensors by order or by name: inputs [B, T, h, *dims], params [h, *dims],
    where every head count h divides the largest, H. Further keywords: the spec's consts;
    ``initial_state`` [N, H, K, V]; ``output_final_state``; ``cu_seqlens`` [N + 1] for N sequences packed
    into a batch of one (``cu_seqlens_cpu``, the same on the CPU, spares a wait where one is needed;
    ``max_seqlen`` is a hint). The output is [B, T, H, V] in the type of v, and with
    ``output_final_state`` the state [N, H, K, V] in float32 (float64 for float64 inputs) comes second.
    Several states go in as a sequence, a named tuple or a mapping, and come out as a named tuple. States
    handed in may be of any floating-point type (bfloat16 storage); they are computed with in float32.

    ``slots`` [N] (int32 or int64): ``initial_state`` is a pool [P, H, ...] of which sequence n begins with
    row ``slots[n]``; with ``output_final_state`` the final states are written there, in the pool's type, and
    the pool is what is returned. A sequence with a negative slot starts as declared and is written nowhere.
    ``state_positions`` (whole numbers, or a list of them for each packed sequence): the states after so
    many tokens come last, [M, B, H, ...], of packed sequences [M, H, ...]; the call is cut there.
    """

    def __init__(
        self, spec: RecurrenceSpec, options: CompileOptions, passes: Passes, stages: Stages | None = None
    ) -> None:
        if clash := RESERVED & {*(x.name for x in spec.inputs), *(x.name for x in spec.consts)}:
            raise ArgumentError(f"{spec.name}: {min(clash)} is a keyword of every call; choose another name")
        self.spec = spec
        self.options = options
        self.stages = replace(stages or single(spec), reverse=options.reverse)
        self.state_type = state_tuple(spec)
        self._passes = passes
        self.stage_ops = tuple(
            StageOp(stage.spec, stage_options(options, self.stages, stage), passes)
            for stage in self.stages.stages
        )
        self.decoder = Decoder(spec, options, passes)
        self._own_tuner: Tuner | None = None
        self._quick: QuickCall | None = None
        if self.stages.is_whole and len(spec.states) == 1 and quick_is_safe(options):
            self._quick = QuickCall(spec, self.stage_ops[0].quick)
        self.program_text = None if self.stages.is_whole else emit_pipeline(self.stages)
        # what torch.compile traces through has to be there before it is called
        self.program = None
        if self.program_text is not None:
            self.program = load_module(f"{ascii_identifier(spec.name)[:50]}_stages", self.program_text)
        self.__name__ = self.__qualname__ = spec.name
        self.__doc__ = spec.doc or type(self).__doc__

    # -- the call -----------------------------------------------------------------------------
    @overload
    def __call__(
        self,
        *args: Tensor,
        initial_state: Any = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        max_seqlen: int | None = None,
        slots: Tensor | None = None,
        state_positions: Sequence[Any] | None = None,
        **kwargs: Tensor | float,
    ) -> Any: ...

    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __call__(
        self,
        *args: Tensor,
        initial_state: Any = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        max_seqlen: int | None = None,
        slots: Tensor | None = None,
        state_positions: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        if slots is not None or state_positions is not None:
            offsets = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "max_seqlen": max_seqlen}
            if slots is not None:
                more = {**kwargs, **offsets, "state_positions": state_positions}
                return call_with_pool(self, args, more, initial_state, slots, output_final_state)
            assert state_positions is not None
            return call_at_positions(
                self, args, kwargs, initial_state, state_positions, output_final_state, offsets
            )
        if not isinstance(output_final_state, (bool, int)):
            kind = type(output_final_state).__name__
            raise ArgumentError(f"{self.spec.name}: output_final_state must be True or False, got a {kind}")
        quick = None
        if self._quick is not None:
            hints = _hints(cu_seqlens_cpu, max_seqlen)
            quick = self._quick.describe(args, kwargs, initial_state, output_final_state, cu_seqlens, hints)
            found = None if quick is None else self._quick.replay(*quick)
            if found is not None:
                return (found[0], found[1]) if output_final_state else found[0]
        call = bind(self.spec, args, kwargs, initial_state, cu_seqlens, self.options.state_layout)
        _check_hints(self.spec.name, cu_seqlens, cu_seqlens_cpu, max_seqlen)
        if self.options.debug and not is_compiling():
            check_promises(self.spec, call.tensors)
            if cu_seqlens is not None:
                check_offsets_data(self.spec.name, cu_seqlens, call.sizes["T"])
        if is_sharded((*call.tensors, *call.initials)):
            return self._call_sharded(call, cu_seqlens, output_final_state)
        kind = call.tensors[0].device.type
        backend = self.backend_for(kind, any(x.dtype == torch.float64 for x in call.tensors))
        if backend == "reference":
            o, states = self._step_loop(call, cu_seqlens, output_final_state, None)
            o = o.to(call.tensors[output_like(self.spec)].dtype)
        else:
            if not is_compiling():
                refuse_transforms(self.spec.name, (*call.tensors, *call.initials))
            if backend == "torch" and kind != "cpu" and cu_seqlens_cpu is not None:
                cu_seqlens = cu_seqlens_cpu
            chosen = self
            if self.options.tune and backend == "triton":
                chosen = self._tuner().op_for(call.tensors, call.sizes, cu_seqlens)
            runs = [partial(stage.run, backend, call.consts) for stage in chosen.stage_ops]
            o, states = self.run_stages(runs, call, cu_seqlens, output_final_state)
            if quick is not None and self._quick is not None and backend == "triton":
                numbers = self.stage_ops[0].numbers(call.consts)
                self._quick.learn(quick[1], args, kwargs, call, numbers, output_final_state, cu_seqlens)
        return self._results(o, states, output_final_state)

    def step(
        self,
        *args: Tensor,
        state: Any = None,
        slots: Tensor | None = None,
        accepted: Tensor | int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """A few tokens of many sequences, from states that are updated in place: ``(o, state)``.

        Tensors are those of a call, [B, n, h, *dims] with n tokens each, one mostly; o is [B, n, H, ...].
        ``state`` is what a call hands out, of any floating-point type (computed with in float32) and any
        strides: entry b is sequence b's, and afterwards holds the state after its tokens. It is also what
        is returned; None makes one that starts as declared. With ``slots`` [B] (int32 or int64, on the
        device) the state is a pool [P, H, ...], of which sequence b has row ``slots[b]``. A negative slot
        is padding: its output is zero and nothing is written. Two sequences with one slot leave there what
        either of them wrote. A slot beyond the pool gives NaN on a GPU, an error on the CPU.

        ``accepted`` (a number, or [B] on the device): of how many tokens of each sequence the state is
        kept, where the others are drafts that may be rejected; the output is of all n. ``accepted=0`` only
        looks ahead: then calling once more with what was accepted rolls back (derivation: the states after
        any number of tokens follow from the state before them and the tokens themselves).

        No gradients: raises ``ArgumentError`` where one would be wanted. Never waits for the device.
        """
        return self.decoder.step(self.backend_for, args, kwargs, state, slots, accepted)

    def new_state(
        self,
        count: int,
        heads: int,
        K: int | None = None,
        V: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        **consts: float,
    ) -> Any:
        """What is carried, before the first token: of ``count`` sequences, or a pool of so many rows.

        [count, heads, ...] in ``dtype``, a named tuple where several tensors are carried. A row of a pool is
        begun anew with ``pool[slot] = op.new_state(1, ...)[0]``.
        """
        sizes = {name: size for name, size in (("K", K), ("V", V)) if size is not None}
        return new_state(self, count, heads, sizes, dtype, device, consts)

    def reference(
        self,
        *args: Tensor,
        initial_state: Any = None,
        output_final_state: Any = False,
        cu_seqlens: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The step-by-step loop of the spec on the same arguments: any dtype, differentiable twice, slow."""
        call = bind(self.spec, args, kwargs, initial_state, cu_seqlens, self.options.state_layout)
        o, states = self._step_loop(call, cu_seqlens, output_final_state, dtype)
        return self._results(o, states, output_final_state)

    def with_options(self, **changes: Any) -> CompiledOp:
        """The same recurrence compiled with other options, by the same passes (``CompileOptions``)."""
        return CompiledOp(self.spec, replace(self.options, **changes), self._passes, self.stages)

    def check(self, **kwargs: Any) -> CheckReport:
        """Errors of output, final state and every gradient against the float64 reference.

        Of one case where it is described by B, T, H, K, V, gates, heads, cu_seqlens or consts
        (``linalg_dsl.ops.check.run_check``). Else a numerics certificate, the worst over ``draws`` inputs,
        ordinary and at the nasty ends (``linalg_dsl.testing.certificate.certify``). Both take dtype, device
        and seed, print as tables and say with ``ok`` whether every error is within its bound.
        """
        if kwargs.keys() & _ONE_CASE:
            from linalg_dsl.ops.check import run_check

            return run_check(self, **kwargs)
        from linalg_dsl.testing.certificate import certify

        return certify(self, **kwargs)

    def _tuner(self) -> Tuner:
        from linalg_dsl.ops.tuned import Tuner

        if self._own_tuner is None:
            self._own_tuner = Tuner(self)
        return self._own_tuner

    # -- what it was made of ------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        """The derivation and the chunk plans, printable; ``plan.explain(B=, T=, H=, K=, V=)``."""
        chosen = self.options
        asked = (chosen.schedule, chosen.super_chunk, chosen.invariant, chosen.launch)
        plans = [
            StagePlan(stage.artefacts(), chosen.chunk_size, stage.traced_text, *asked)
            for stage in self.stage_ops
        ]
        return Plan(self.stages, tuple(plans))

    def artefacts(self, consts: Consts = ()) -> Artefacts:
        """Canonical form and plans with these consts fixed, of a recurrence that is one stage."""
        return self._whole().artefacts(consts)

    def derive(self) -> None:
        """Derives the plans of all stages, so that mistakes are reported."""
        for stage in self.stage_ops:
            stage.artefacts()

    def source(self, which: str = "module", backend: str | None = None) -> str:
        """The generated text: "forward", "backward" or "step" with all they call, or the whole "module".

        ``backend`` is "triton" or "torch"; by default what a call would use where tensors are on this
        machine's best device. Several stages stand one below the other, after the steps between them.
        """
        if which not in ("forward", "backward", "step", "module"):
            raise ArgumentError(f"source is of forward, backward, step or module, got {which!r}")
        chosen = backend or self._default_backend()
        if which == "step":
            return self.decoder.text(chosen)
        texts = [(s.spec.name, s.module_text(chosen)) for s in self.stage_ops]
        if which != "module":
            texts = [(name, part_of(text, which)) for name, text in texts]
        if self.program_text is None:
            return texts[0][1]
        pieces = [] if which == "backward" else [self.program_text]
        pieces += [
            f"# -- stage {i} of {len(texts)}: {ascii_text(name)} --\n\n{text}"
            for i, (name, text) in enumerate(texts, 1)
        ]
        return "\n\n".join(pieces)

    def module_text(self, backend: str, consts: Consts = ()) -> str:
        """The whole generated module of a backend, of a recurrence that is one stage."""
        return self._whole().module_text(backend, consts)

    def modules(self, backend: str) -> tuple[Module, ...]:
        """Every generated module of a backend, stage by stage."""
        pairs = zip(self.stage_ops, self.stages.stages, strict=True)
        return tuple(Module(op.spec.name, op.module_text(backend), stage.axes) for op, stage in pairs)

    def export(self, path: str | os.PathLike[str], backend: str | None = None, step: bool = False) -> Path:
        """Writes one file that needs only torch (and triton): the module and a function to call it.

        With ``step`` a second function, NAME_step, is ``op.step``.
        """
        from linalg_dsl.codegen.emit.standalone import StageModule, StepModule, standalone_text
        from linalg_dsl.codegen.emit.torch_helpers import inlined

        chosen = backend or self._default_backend()
        target = Path(path)
        modules = [
            StageModule(stage, inlined(op.module_text(chosen)), op.operator(chosen).consts)
            for op, stage in zip(self.stage_ops, self.stages.stages, strict=True)
        ]
        decode = None
        if step:
            if self.options.reverse:
                raise ArgumentError(
                    f"{self.spec.name}: step runs from earlier to later tokens, and reverse=True"
                )
            operator = self.decoder.operator(chosen)
            text = inlined(self.decoder.text(chosen))
            decode = StepModule(text, tuple(operator.module.CONSTS), operator.form.parts)
        target.write_text(standalone_text(self.stages, modules, self.program_text, decode), encoding="utf-8")
        return target

    def operator(self, backend: str, consts: Consts = ()) -> Operator:
        """The registered torch operators of a backend, of a recurrence that is one stage."""
        return self._whole().operator(backend, consts)

    # -----------------------------------------------------------------------------------------
    def _whole(self) -> StageOp:
        if self.stages.is_whole:
            return self.stage_ops[0]
        names = ", ".join(s.spec.name for s in self.stage_ops)
        raise ArgumentError(f"{self.spec.name} runs in stages ({names}); ask each of op.stage_ops")

    def run_stages(
        self,
        runs: Sequence[Callable[..., tuple[Tensor, States]]],
        call: BoundCall,
        cu_seqlens: Tensor | None,
        want: bool,
    ) -> tuple[Tensor, States]:
        """The output and what is carried on; ``runs``, one per stage, take what ``StageOp.run`` takes after
        its consts and compute that stage in whatever way."""
        if self.program is None:
            return runs[0](call.tensors, call.initials, cu_seqlens, want)
        check_const_axes(self.spec, call.sizes, dict(call.consts))
        for name, value in self.stages.fixed:
            if dict(call.consts).get(name, value) != value:
                raise ArgumentError(
                    f"{self.spec.name}: const {name} is fixed at {value:g}, as substeps read another state; "
                    "change its declaration"
                )
        numbers: tuple[float, ...] = ()
        if self.program.NUMBERS:
            values = {**call.sizes, **const_numbers(self.spec, call.sizes, dict(call.consts))}
            numbers = tuple(values[n] for n in self.program.NUMBERS)
        if type(cu_seqlens) is Tensor and cu_seqlens.device.type == "cpu" and not is_compiling():
            check_offsets_data(self.spec.name, cu_seqlens, call.sizes["T"])
        o, carried = self.program.run(runs, call.tensors, call.initials, numbers, cu_seqlens, want)
        return o, carried or ()

    def _call_sharded(self, call: BoundCall, cu_seqlens: Tensor | None, want: bool) -> Any:
        """The call on this rank's part of distributed tensors."""

        def run(
            tensors: list[Tensor], initials: list[Tensor | None], offsets: Tensor | None
        ) -> tuple[Tensor, States]:
            given = turn_all(initials, carried_dims(self.spec), self.options.state_layout)
            out = self(
                *tensors,
                initial_state=given[0] if len(given) == 1 else given,
                output_final_state=want,
                cu_seqlens=offsets,
                **dict(call.consts),
            )
            if not want:
                return out, ()
            lasts = (out[1],) if isinstance(out[1], Tensor) else tuple(out[1])
            return out[0], turn_all(lasts, carried_dims(self.spec), self.options.state_layout)

        o, states = run_sharded(self.spec, call.tensors, call.initials, cu_seqlens, run)
        return self._results(o, states, want)

    def short_loop(
        self, operand: Rounding, call: BoundCall, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Output and final states of form (1), token by token, its products with operands so rounded."""
        runs = [partial(s.short_loop, operand, call.consts) for s in self.stage_ops]
        return self.run_stages(runs, call, cu_seqlens, True)

    def _step_loop(
        self, call: BoundCall, cu_seqlens: Tensor | None, want: bool, dtype: torch.dtype | None
    ) -> tuple[Tensor, States]:
        o, states = reference(
            self.spec,
            {d.name: x for d, x in zip(self.spec.inputs, call.tensors, strict=True)},
            initial_state=all_started(self.spec, call.initials, call.sizes, call.tensors[0]),
            output_final_state=want,
            cu_seqlens=cu_seqlens,
            consts=dict(call.consts),
            dtype=dtype,
            reverse=self.options.reverse,
        )
        return o, (states,) if isinstance(states, Tensor) else tuple(states or ())

    def _results(self, o: Tensor, states: States, want: bool) -> Any:
        if not want:
            return o
        states = turn_all(states, carried_dims(self.spec), self.options.state_layout)
        return o, states[0] if len(states) == 1 else self.state_type(*states)

    @property
    def passes(self) -> Passes:
        """What it runs when it first needs it."""
        return self._passes

    @constant
    def backend_for(self, device: str, double: bool) -> str:
        """The backend of a call with tensors on this type of device, in float64 or not."""
        wanted = self.options.backend
        if wanted == "auto":
            wanted = "triton" if device == "cuda" else "torch"
            if wanted == "triton" and double:
                reason = f"{self.spec.name}: float64 has no Triton kernels; the torch backend runs instead"
                if self.options.strict:
                    raise ArgumentError(f"{reason}, which strict=True forbids")
                warnings.warn(reason, stacklevel=3)
                wanted = "torch"
        elif wanted == "triton":
            if double:
                raise ArgumentError(
                    f"{self.spec.name}: the triton backend takes float16, bfloat16 and float32, got float64"
                )
            if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
                raise ArgumentError(
                    f"{self.spec.name}: the triton backend needs tensors on a GPU, got {device} "
                    "(with TRITON_INTERPRET=1 its interpreter takes CPU tensors)"
                )
        return wanted

    def _default_backend(self) -> str:
        wanted = self.options.backend
        return wanted if wanted in ("triton", "torch") else "triton" if torch.cuda.is_available() else "torch"

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledOp, (self.spec, self.options, self._passes, self.stages)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledOp:
        return self  # it never changes

    def __repr__(self) -> str:
        inputs = ", ".join(d.name for d in self.spec.inputs)
        return f"<linalg_dsl op {self.spec.name}({inputs}), backend {self.options.backend}>"


def _hints(cu_seqlens_cpu: Any, max_seqlen: Any) -> tuple[object, ...]:
    """What a call's hints are like: they are checked once, and kernels make no use of them."""
    if cu_seqlens_cpu is None and max_seqlen is None:
        return ()
    if isinstance(cu_seqlens_cpu, Tensor):
        return (cu_seqlens_cpu.shape, cu_seqlens_cpu.device, type(max_seqlen))
    return (type(cu_seqlens_cpu), type(max_seqlen))


def _check_hints(name: str, cu_seqlens: Any, cu_seqlens_cpu: Any, max_seqlen: Any) -> None:
    if cu_seqlens_cpu is not None:
        if cu_seqlens is None:
            raise ArgumentError(f"{name}: cu_seqlens_cpu needs cu_seqlens, of which it is a copy")
        if not isinstance(cu_seqlens_cpu, Tensor) or cu_seqlens_cpu.device.type != "cpu":
            raise ArgumentError(f"{name}: cu_seqlens_cpu must be a tensor on the CPU")
        if cu_seqlens_cpu.shape != cu_seqlens.shape:
            raise ArgumentError(
                f"{name}: cu_seqlens_cpu has shape {tuple(cu_seqlens_cpu.shape)}, "
                f"cu_seqlens {tuple(cu_seqlens.shape)}"
            )
    if max_seqlen is not None and not isinstance(max_seqlen, int):
        raise ArgumentError(f"{name}: max_seqlen must be an int, got {type(max_seqlen).__name__}")
