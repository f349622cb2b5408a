"""Host time of calls and steps, and the GPU time of a step beside what its bytes alone take.

python tests/gpu/measure_decode.py             decode times and host times on the GPU at hand
python tests/gpu/measure_decode.py --names a,b of these entries, in place of one of each class
python tests/gpu/measure_decode.py --stub      host times alone, on a CPU, with launches that do nothing
python tests/gpu/measure_decode.py --sweep     decode times of blocks and warps around those chosen

Wanted of one H200: a forward call of a chunk class in at most 120 us of host time, a step in 40; a step of
16 heads with K = V = 128 and a float32 state at 85 % of its bytes' speed at 256 and at 64 sequences.
Processes of their own compile the kernels before anything is timed, without the self-check at a first use.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

NAMES = ("linear_attention", "gla", "gated_delta_rule", "kda", "rwkv7", "gated_oja", "mlstm")
"""One of each class, and a recurrence of several stages."""
BATCHES = (1, 64, 256)
H, K, V = 16, 128, 128
HOST, STEP, SHARE = 120.0, 40.0, 0.85
CALLS, ROUNDS = 300, 7
WHEN_DRY = {"CALLS": 3, "ROUNDS": 1, "H": 2, "NAMES": ("gated_oja",)}
"""Where there is no GPU (tests/stand_in)."""


class Stub:
    """A jit function that compiles to a kernel whose launch does nothing."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(*args: Any, num_warps: int, num_stages: int, **constants: Any) -> Any:
            return SimpleNamespace(run=lambda *a: None, function=0, packed_metadata=(num_warps, 1, 0))

        return start


def stub(module: ModuleType) -> None:
    for name, value in list(vars(module).items()):
        if hasattr(value, "arg_names"):
            setattr(module, name, Stub(value))


def host_us(run: Callable[[], object], wait: Callable[[], None]) -> float:
    """The least mean of a round of calls, nothing waited for within it."""
    for _ in range(20):
        run()
    best = float("inf")
    for _ in range(ROUNDS):
        wait()
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        best = min(best, time.perf_counter() - begin)
    return best / CALLS * 1e6


def device_us(run: Callable[[], object], repeats: int = 50) -> float:
    """The median time of a call on the GPU, by events around each, in a graph: no host time in it."""
    import torch

    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            run()
    event: Any = torch.cuda.Event
    times = []
    for _ in range(repeats):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    return float(sorted(times)[len(times) // 2])


def tensors_of(op: Any, batch: int, length: int, device: str, small: bool = False) -> dict[str, Any]:
    import torch

    from linalg_dsl.ops.draw import draw

    sizes = (4, 32, 32) if small else (H, K, V)
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    return draw(op.spec, batch, length, *sizes, dtype=kind, device=device)


def host_calls(name: str, stubbed: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward call and a step of small tensors, for ``torch.inference_mode``."""
    import torch

    import linalg_dsl as ld
    from linalg_dsl.ops.catalogue import catalogue_text

    device = "cpu" if stubbed else "cuda"
    op = ld.compile(catalogue_text(name), backend="triton")
    if stubbed:
        stub(op.decoder.operator("triton").module)
        for stage in op.stage_ops:
            stub(stage.operator("triton").module)
    call = tensors_of(op, 2, 64, device, small=True)
    token = tensors_of(op, 4, 1, device, small=True)
    pool = op.new_state(16, 4, K=32, V=32, device=device)
    slots = torch.tensor([3, 1, 0, 9], device=device)
    return lambda: op(**call), lambda: op.step(**token, state=pool, slots=slots)


def compile_kernels(name: str) -> None:
    """Leaves what this entry's measurements launch in Triton's cache, for the process that asks."""
    import torch

    with torch.inference_mode():
        for run in host_calls(name, False):
            run()
        for batch in BATCHES:
            decode_case(name, batch)[0]()


def measure_host(names: Sequence[str], stubbed: bool) -> bool:
    import torch

    wait: Callable[[], None] = (lambda: None) if stubbed else torch.cuda.synchronize
    good = True
    for name in names:
        with torch.inference_mode():
            forward, step = (host_us(run, wait) for run in host_calls(name, stubbed))
        good &= forward <= HOST and step <= STEP
        print(
            f"{name:20} host time: forward {forward:6.1f} us ({HOST:.0f}), step {step:5.1f} us ({STEP:.0f})",
            flush=True,
        )
    return good


def copy_speed() -> float:
    """Bytes per second of a copy."""
    import torch

    from linalg_dsl.ops.bench import device_rates

    return device_rates(torch.device("cuda"), torch.bfloat16).bandwidth


def decode_case(name: str, batch: int) -> tuple[Callable[[], object], int]:
    """A step of ``batch`` sequences, and the bytes that it moves."""
    import torch

    import linalg_dsl as ld
    from linalg_dsl.ops.catalogue import catalogue_text

    op = ld.compile(catalogue_text(name))
    token = tensors_of(op, batch, 1, "cuda")
    with torch.inference_mode():
        o, state = op.step(**token)
    states = [state] if isinstance(state, torch.Tensor) else list(state)
    slots = torch.randperm(batch, device="cuda").to(torch.int32)

    def run() -> object:
        with torch.inference_mode():
            return op.step(**token, state=state, slots=slots)

    moved = sum(x.nbytes for x in token.values()) + o.nbytes + 2 * sum(x.nbytes for x in states)
    return run, moved


def measure_decode(names: Sequence[str]) -> bool:
    speed, good = copy_speed(), True
    print(f"copy: {speed / 1e12:.2f} TB/s", flush=True)
    for name in names:
        for batch in BATCHES:
            run, moved = decode_case(name, batch)
            took, floor = device_us(run), moved / speed * 1e6
            share = floor / took
            good &= batch == 1 or share >= SHARE
            print(
                f"{name:20} B {batch:3}: {took:6.1f} us, bytes alone {floor:6.1f} us: {share:.0%}", flush=True
            )
    return good


def sweep(names: Sequence[str]) -> None:
    """Blocks and warps in place of those that choose_decode gives."""
    import linalg_dsl as ld
    from linalg_dsl.ops.catalogue import catalogue_text

    speed = copy_speed()
    for name in names:
        for batch in BATCHES:
            run, moved = decode_case(name, batch)
            module: Any = ld.compile(catalogue_text(name)).decoder.operator("triton").module
            chosen = module.choose_decode
            rows = []
            for block in (8, 16, 32, 64, 128):
                for warps in (1, 2, 4, 8):
                    module.choose_decode = lambda *a, b=block, w=warps: (b, w, 1)
                    fresh, _ = decode_case(name, batch)
                    rows.append((device_us(fresh, 10), block, warps))
            module.choose_decode = chosen
            best = min(rows)
            now = device_us(run, 10)
            print(
                f"{name:20} B {batch:3}: chosen {now:6.1f} us, best {best[0]:6.1f} us with block {best[1]} "
                f"warps {best[2]}; bytes alone {moved / speed * 1e6:6.1f} us"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--names", default=",".join(NAMES))
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile, 0: none")
    chosen = parser.parse_args()
    asked = chosen.names.split(",")
    os.environ.setdefault("LINALG_DSL_SELFCHECK", "0")
    if chosen.stub:
        os.environ["TRITON_INTERPRET"] = "1"
        raise SystemExit(0 if measure_host(asked, True) else 1)
    if chosen.sweep:
        sweep(asked)
        raise SystemExit(0)
    began = time.perf_counter()
    if chosen.jobs:
        with multiprocessing.get_context("spawn").Pool(min(chosen.jobs, len(asked))) as pool:
            pool.map(compile_kernels, asked, chunksize=1)
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    fine = measure_decode(asked)
    raise SystemExit(0 if measure_host(asked, False) and fine else 1)
