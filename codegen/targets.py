"""GPU targets: their limits, and what the compiler makes of a module's kernels without such a GPU."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from linalg_dsl.codegen.machine_faults import fault_of
from linalg_dsl.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Target:
    """``shared``: bytes of shared memory that one program may take; ``units``: multiprocessors.

    ``bandwidth``: bytes per microsecond to memory, on sm_90 as measured on an H200, else as the makers say.
    """

    name: str
    backend: str
    arch: int | str
    warp: int
    shared: int
    units: int
    bandwidth: float


TARGETS = {
    t.name: t
    for t in (
        Target("sm_80", "cuda", 80, 32, 163 * 1024, 108, 2.0e6),
        Target("sm_86", "cuda", 86, 32, 99 * 1024, 84, 0.77e6),
        Target("sm_90", "cuda", 90, 32, 227 * 1024, 132, 4.26e6),
        Target("sm_100", "cuda", 100, 32, 227 * 1024, 148, 8.0e6),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024, 304, 5.3e6),
    )
}


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel as compiled: registers per thread, bytes spilled per thread, shared memory per program."""

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    limit: int
    warps: int
    stages: int
    blocks: str
    seconds: float
    fault: str = ""
    """An instruction that is known to be wrong (``codegen.machine_faults``)."""

    @property
    def fits(self) -> bool:
        return self.shared <= self.limit


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher would start: a kernel with the types of its arguments and its constants."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    aligned: tuple[str, ...] = ()
    """Numbers that are multiples of 16, as strides are."""

    @property
    def key(self) -> str:
        """Equal for launches that compile to the same code."""
        text = repr((self.kernel.src, self.signature, self.constants, self.warps, self.stages, self.aligned))
        return hashlib.sha256(text.encode()).hexdigest()


def find_target(name: str) -> Target:
    try:
        return TARGETS[name]
    except KeyError:
        raise ArgumentError(f"target: expected one of {', '.join(TARGETS)}, got {name!r}") from None


def report(
    text: str,
    target: str,
    *,
    key: int = 128,
    value: int = 128,
    dtype: str = "bfloat16",
    batch: int = 8,
    length: int = 2048,
    heads: int = 16,
    seen: set[str] | None = None,
) -> Iterator[KernelReport]:
    """Compiles every kernel that a call of this shape launches; no GPU is needed.

    ``text`` is an emitted Triton module, for whole sequences or for steps. ``seen`` collects the keys of
    compiled kernels and skips those already in it. Raises ``ArgumentError`` for an unknown target and
    ``RuntimeError`` under TRITON_INTERPRET, where kernels are not compiled.
    """
    place = find_target(target)
    find = launches if "\ndef forward(" in text else step_launches
    for launch in find(
        text, place, key=key, value=value, dtype=dtype, batch=batch, length=length, heads=heads
    ):
        if seen is not None:
            if launch.key + target in seen:
                continue
            seen.add(launch.key + target)
        yield _compile(launch, place)


def launches(
    text: str, target: Target, *, key: int, value: int, dtype: str, batch: int, length: int, heads: int
) -> Sequence[Launch]:
    """The launches of one forward and backward on tensors without data, block sizes of ``target``."""
    import torch
    import triton

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter does not compile kernels")
    found: list[Launch] = []
    with tempfile.TemporaryDirectory() as folder:
        module = _load_for(target, text, Path(folder))

        def record(
            call: Any, kernel: Any, programs: int, tensors: Any, tables: Any, scalars: Any,
            ratios: Any, more: Any, warps: int, stages: int,
        ) -> None:  # fmt: skip
            given = call.constants(kernel, ratios, more)
            constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
            values = [*tensors, *tables, *scalars, 16, *(v for n, v in given.items() if n not in constants)]
            names = [n for n in kernel.arg_names if n not in constants]
            types = tuple((n, _type(v)) for n, v in zip(names, values, strict=True) if v is not None)
            constants |= {n: None for n, v in zip(names, values, strict=True) if v is None}
            found.append(Launch(kernel, types, tuple(constants.items()), warps, stages))

        module.Call.launch = record
        tensors, states = _meta(module, key, value, dtype, batch, length, heads)
        consts = (1.0,) * len(module.CONSTS)
        given = (tensors, states, consts, None)
        o, finals, residuals = module.forward(*given, True, True)
        module.backward(*given, residuals, torch.empty_like(o), finals)
    return found


def step_launches(
    text: str, target: Target, *, key: int, value: int, dtype: str, batch: int, length: int, heads: int
) -> Sequence[Launch]:
    """The launch of one step of ``length`` tokens with slots; ``text`` is a module that decodes."""
    import torch

    found: list[Launch] = []

    def record(
        kernel: Any, programs: int, arguments: Any, constants: Any, warps: int, stages: int
    ) -> None:  # fmt: skip
        fixed = {p.name: constants[p.name] for p in kernel.params if p.is_constexpr}
        types, aligned = [], []
        for parameter, x in zip((p for p in kernel.params if not p.is_constexpr), arguments, strict=True):
            whole = isinstance(x, int) and not parameter.do_not_specialize
            if whole and x == 1:
                fixed[parameter.name] = 1
                continue
            types.append((parameter.name, _type(x)))
            if whole and x % 16 == 0:
                aligned.append(parameter.name)
        found.append(Launch(kernel, tuple(types), tuple(fixed.items()), warps, stages, tuple(aligned)))

    with tempfile.TemporaryDirectory() as folder:
        module: Any = _load_for(target, text, Path(folder))
        tensors, states = _meta(module, key, value, dtype, batch, length, heads)
        slots = torch.empty(batch, dtype=torch.int32, device="meta")
        module.step(tensors, list(states), (1.0,) * len(module.CONSTS), slots, None, length, launch=record)
    return found


def _load_for(target: Target, text: str, folder: Path) -> ModuleType:
    """The module, choosing its blocks as on a target."""
    module = _load(text, folder)
    limits = (target.units, target.shared, target.backend == "hip")
    module.device_limits = lambda device: limits  # type: ignore[attr-defined]
    major = int(target.arch) // 10 if target.backend == "cuda" else 0
    module.device_bandwidth = lambda device: target.bandwidth  # type: ignore[attr-defined]
    module.architecture = lambda device: major  # type: ignore[attr-defined]
    return module


def _meta(
    module: Any, key: int, value: int, dtype: str, batch: int, length: int, heads: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs and states without data: vectors in ``dtype``, scalars and states in float32."""
    import torch

    sizes = {"K": key, "V": value}
    kind = getattr(torch, dtype)
    tensors = []
    for timed, dims in zip(module.TIMED, module.DIMS, strict=True):
        lead = (batch, length, heads) if timed else (heads,)
        wide = any(d in sizes for d in dims)
        shape = (*lead, *(sizes.get(d, d) for d in dims))
        tensors.append(torch.empty(shape, dtype=kind if wide else torch.float32, device="meta"))
    states = []
    for dims in getattr(module, "STATE_DIMS", (("K", "V"),) * len(module.STATES)):
        shape = (batch, heads, *(sizes.get(d, d) for d in dims))
        states.append(torch.empty(shape, dtype=torch.float32, device="meta"))
    return tuple(tensors), tuple(states)


def _load(text: str, folder: Path) -> ModuleType:
    path = folder / "module.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("linalg_dsl_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for item in vars(module).values():
        if hasattr(item, "src"):
            _ = item.src  # Triton reads the source from the file, which will be gone
    return module


def _type(value: Any) -> str:
    import torch

    names = {
        torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
        torch.int32: "*i32", torch.int64: "*i64",
    }  # fmt: skip
    if isinstance(value, torch.Tensor):
        return names[value.dtype]
    if hasattr(value, "block_shape"):
        return f"tensordesc<{names[value.base.dtype][1:]}{list(value.block_shape)}>"
    return "i32" if isinstance(value, int) else "fp32"


def _compile(launch: Launch, target: Target) -> KernelReport:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(launch.constants)
    types = dict(launch.signature)
    signature = {n: types.get(n, "constexpr") for n in launch.kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(signature)
        if signature[n].startswith("*") or n in launch.aligned
    }
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    start = time.perf_counter()
    compiled = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    registers, spilled = _usage(compiled, target)
    blocks = ", ".join(f"{n} {constants[n]}" for n in ("C", "BLOCK") if n in constants)
    return KernelReport(
        launch.kernel.__name__, target.name, registers, spilled, compiled.metadata.shared, target.shared,
        launch.warps, launch.stages, blocks, time.perf_counter() - start, fault_of(compiled) or "",
    )  # fmt: skip


def _usage(compiled: Any, target: Target) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]

        def field(name: str) -> int:
            return max((int(x) for x in re.findall(rf"\.{name}:\s+(\d+)", text)), default=0)

        return field("vgpr_count"), 4 * field("vgpr_spill_count")
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        out = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.findall(r"REG:(\d+) STACK:(\d+)", out.stdout + out.stderr)
    return max(int(r) for r, _ in found), max(int(s) for _, s in found)
