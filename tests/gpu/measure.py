"""Errors of the catalogue's Triton kernels on the GPU at hand, and times over block sizes.

python tests/gpu/measure.py check [--names a,b] [--jobs 8]      errors against the float64 step loop
python tests/gpu/measure.py kernels [--names a,b]               times of every kernel by itself
python tests/gpu/measure.py sweep [--names a,b]                 times of every kernel over block sizes

Times of operators, beside fla-core's: ``linalg-dsl bench``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SMALL = {"B": 2, "T": 1000, "H": 3, "K": 100, "V": 60}
TRAIN = {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128}
WHEN_DRY = {"SMALL": {**SMALL, "T": 130}, "TRAIN": {**TRAIN, "B": 2, "T": 130}}
"""Where there is no GPU (tests/stand_in)."""
LIMITS = {"bfloat16": (1e-2, 2e-2), "float16": (1e-2, 2e-2), "float32": (5e-5, 5e-5)}


def pipeline(name: str, nan_exact: bool = True) -> tuple[Any, Any, str]:
    """(spec, canonical form, Triton module text) of a catalogue entry."""
    from importlib.resources import files

    from linalg_dsl.codegen.emit.triton_module import emit_triton
    from linalg_dsl.language.parser import parse
    from linalg_dsl.planner.adjoint import backward
    from linalg_dsl.planner.canonical import canonicalise
    from linalg_dsl.planner.chunkwise import derive

    text = (files("linalg_dsl.ops.catalogue") / f"{name}.rec").read_text(encoding="utf-8")
    spec = parse(text, name)
    canonical = canonicalise(spec)
    forward = derive(canonical)
    return spec, canonical, emit_triton(canonical, forward, backward(forward), nan_exact=nan_exact)


def load(name: str, text: str) -> Any:
    import importlib.util
    import pathlib
    import tempfile

    folder = pathlib.Path(tempfile.gettempdir()) / "linalg_dsl_measure"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    found = importlib.util.spec_from_file_location(f"measure_{name}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def operands(
    spec: Any, module: Any, dtype: str, shape: Mapping[str, int], gates: str
) -> tuple[Any, Any, Any]:
    import torch

    from linalg_dsl.ops.draw import draw, draw_state
    from linalg_dsl.ops.reference import const_values

    kind = getattr(torch, dtype)
    tensors = draw(spec, **shape, dtype=torch.float64, gates=gates)  # type: ignore[arg-type]
    narrow = {}
    for decl in spec.inputs:
        wide = "K" in decl.dims or "V" in decl.dims
        gate = decl.kind != "plain"
        narrow[decl.name] = tensors[decl.name].to("cuda", torch.float32 if gate or not wide else kind)
    states = draw_state(spec, shape["B"], shape["H"], shape["K"], shape["V"], dtype=torch.float32)
    consts = const_values(spec, {"K": shape["K"], "V": shape["V"]}, {})
    return narrow, tuple(s.cuda() for s in states), tuple(float(consts[c]) for c in module.CONSTS)


def check(
    name: str, dtype: str, shape: Mapping[str, int], gates: str, heads: Sequence[int] | None
) -> dict[str, Any]:
    """Worst errors per tensor; ``heads`` limits the reference to some heads (they are independent)."""
    import torch

    from linalg_dsl.ops.reference import reference
    from linalg_dsl.planner.evaluate_form import run_form

    spec, canonical, text = pipeline(name)
    module = load(name, text)
    tensors, states, consts = operands(spec, module, dtype, shape, gates)
    values = tuple(t.contiguous() for t in tensors.values())
    torch.manual_seed(1)
    b, h = shape["B"], shape["H"]
    start = time.perf_counter()
    o, finals, residuals = module.forward(values, states, consts, None, True, True)
    d_o = torch.randn(o.shape, device="cuda").to(o.dtype)
    d_finals = tuple(torch.randn_like(x) for x in finals)
    grads, d_initials = module.backward(values, states, consts, None, residuals, d_o, d_finals)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    again, finals2, residuals2 = module.forward(values, states, consts, None, True, True)
    grads2, _ = module.backward(values, states, consts, None, residuals2, d_o, d_finals)
    same = torch.equal(o, again) and all(torch.equal(a, c) for a, c in zip(finals, finals2, strict=True))
    same = same and all(a is None or torch.equal(a, c) for a, c in zip(grads, grads2, strict=True))

    pick = list(range(h)) if heads is None else list(heads)
    # a gradient of a param sums over the batch; without params two sequences tell as much
    rows = list(range(b)) if heads is None or not all(i.timed for i in spec.inputs) else [0, b - 1]

    def part(x: Any, timed: bool = True) -> Any:
        return x[rows][:, :, pick] if timed else x[pick]

    wanted = {
        decl.name: part(x, decl.timed).double().requires_grad_()
        for decl, x in zip(spec.inputs, values, strict=True)
    }
    starts = [x[rows][:, pick].double().requires_grad_() for x in states]
    ro, last = reference(spec, wanted, initial_state=starts, output_final_state=True)
    ends = (last,) if isinstance(last, torch.Tensor) else last
    weights = [x[rows][:, pick].double() for x in d_finals]
    loss = (ro * part(d_o).double()).sum() + sum((x * w).sum() for x, w in zip(ends, weights, strict=True))
    expected = torch.autograd.grad(loss, [*wanted.values(), *starts], allow_unused=True)
    labels = ("",) if len(states) == 1 else tuple(f"_{s.name}" for s in spec.states)
    pairs = {"o": (part(o), ro.detach())}
    for n, got, want in zip(labels, finals, ends, strict=True):
        pairs[f"state{n}"] = (got[rows][:, pick], want.detach())
    for n, got, want in zip(labels, d_initials, expected[len(values) :], strict=True):
        pairs[f"d_initial{n}"] = (got[rows][:, pick], want)
    for decl, got, want in zip(spec.inputs, grads, expected[: len(values)], strict=True):
        if got is not None:
            pairs[f"d_{decl.name}"] = (part(got, decl.timed), want)
    exact = {key: want for key, (_, want) in pairs.items()}
    errors = distances({key: got for key, (got, _) in pairs.items()}, exact)
    low, high = LIMITS[dtype]
    bad = [k for k, (norm, _) in errors.items() if not norm < (high if k.startswith("d_") else low)]
    excused = {}
    if bad and dtype != "float32" and len(states) == 1:
        # what the recurrence itself makes of operands in this type: twice that error counts instead
        kind = getattr(torch, dtype)
        so, ss = run_form(canonical, wanted, starts[0], operand=lambda x: x.to(kind).to(x.dtype))
        total = (so * part(d_o).double()).sum() + (ss * weights[0]).sum()
        short = torch.autograd.grad(total, [*wanted.values(), starts[0]], allow_unused=True)
        results = {"o": so.detach(), "state": ss.detach(), "d_initial": short[-1]}
        results |= {f"d_{d.name}": x for d, x in zip(spec.inputs, short[:-1], strict=True) if x is not None}
        loop = distances({k: results[k] for k in exact}, exact)
        excused = {k: loop[k][0] for k in bad if errors[k][0] <= 2 * loop[k][0]}
    return {"errors": errors, "same": same, "first": first, "bad": bad, "excused": excused}


def distances(got: Mapping[str, Any], want: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Relative L2, and the largest error over the largest value; a tiny gradient counts absolutely."""
    largest = max(float(w.norm()) for n, w in want.items() if n.startswith("d_"))
    out = {}
    for key, exact in want.items():
        d = got[key].double() - exact
        scale = max(float(exact.norm()), 1e-6 * largest if key.startswith("d_") else 0.0)
        out[key] = (float(d.norm()) / scale, float(d.abs().max()) / max(float(exact.abs().max()), 1e-30))
    return out


def one_check(job: tuple[str, str, str, str, str]) -> str:
    name, dtype, size, gates, heads = job
    shape = SMALL if size == "small" else TRAIN
    chosen = None if size == "small" else [int(h) for h in heads.split(",")]
    try:
        found = check(name, dtype, shape, gates, chosen)
    except Exception:
        return f"FAIL {name:18s} {dtype:9s} {size:6s} {gates}\n{traceback.format_exc()[-1500:]}"
    bad = [k for k in found["bad"] if k not in found["excused"]]
    cells = " ".join(f"{k} {a:.1e}/{m:.1e}" for k, (a, m) in found["errors"].items())
    verdict = "ok  " if not bad and found["same"] else "FAIL"
    note = "" if found["same"] else " NOT DETERMINISTIC"
    head = f"{verdict} {name:18s} {dtype:9s} {size:6s} {gates:6s} {found['first']:5.1f}s"
    if found["excused"]:
        note += " ill-conditioned, step loop with short operands: "
        note += " ".join(f"{k} {e:.1e}" for k, e in found["excused"].items())
    return f"{head} {cells}{note} {','.join(bad)}"


def kernels(name: str, dtype: str, nan_exact: bool = True) -> str:
    """Median milliseconds of every kernel of a forward and a backward."""
    import torch

    from linalg_dsl.ops.bench import kernel_times

    spec, _, text = pipeline(name, nan_exact)
    module = load(name, text)
    tensors, states, consts = operands(spec, module, dtype, TRAIN, "mild")
    values = tuple(t.contiguous() for t in tensors.values())
    o, finals, _ = module.forward(values, states, consts, None, True, True)
    d_o, d_finals = torch.randn_like(o), tuple(torch.randn_like(x) for x in finals)

    def both() -> None:
        _, _, residuals = module.forward(values, states, consts, None, True, True)
        module.backward(values, states, consts, None, residuals, d_o, d_finals)

    found = kernel_times(module, both, o.device)
    return f"{name:18s} " + "  ".join(f"{k.removeprefix(name + '_')} {t:.3f}" for k, t in found)


def sweep(name: str, dtype: str, timed: bool) -> list[str]:
    """Times of every kernel over block sizes, warps and stages; not ``timed``: compiles them only."""
    from triton.testing import do_bench

    spec, _, text = pipeline(name)
    module = load(name, text)
    tensors, _, consts = operands(spec, module, dtype, TRAIN, "mild")
    values = tuple(t.contiguous() for t in tensors.values())
    original = module.Call.launch
    found: list[tuple[Any, Any, tuple[Any, ...]]] = []

    def record(call: Any, kernel: Any, *rest: Any) -> None:
        original(call, kernel, *rest)
        found.append((call, kernel, rest))

    module.Call.launch = record
    none = (None,) * len(module.STATES)
    o, _, residuals = module.forward(values, none, consts, None, False, True)
    module.backward(values, none, consts, None, residuals, o, None)
    lines = []
    for call, kernel, rest in found:
        times = []
        for label, variant in variants(module, call, rest):
            try:
                original(call, kernel, *variant)
                if timed:
                    again = functools.partial(original, call, kernel, *variant)
                    times.append((do_bench(again, warmup=5, rep=20, return_mode="median"), label))
            except Exception as err:
                times.append((float("inf"), f"{label} {type(err).__name__}"))
        best = "  ".join(f"{label} {t:.3f}" for t, label in sorted(times)[:5])
        lines.append(f"sweep {kernel.__name__:34s} {best}")
    return lines


def variants(module: Any, call: Any, rest: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The launch with other block sizes, warps and stages."""
    programs, *middle, more, _, _ = rest
    if "KB" in more:
        for block, warps in ((32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8)):
            new = {**more, "KB": block, "K_BLOCKS": -(-call.key // block)}
            new |= {"VB": block, "V_BLOCKS": -(-call.value // block)}
            yield f"KB{block} w{warps}", (programs, *middle, new, warps, 1)
    elif "BLOCK" in more:
        for block, warps, stages in (
            (32, 4, 3),
            (64, 4, 2),
            (64, 4, 3),
            (64, 4, 4),
            (64, 8, 3),
            (128, 4, 3),
            (128, 8, 2),
            (128, 8, 3),
        ):
            if block < more["BLOCK"]:
                continue  # sums over the split axis have room for as many blocks as the launcher takes
            new = {**more, "BLOCK": block, "BLOCKS": 128 // block, "STAGES": stages}
            count = programs // more["BLOCKS"] * (128 // block)
            yield f"B{block} w{warps} s{stages}", (count, *middle, new, warps, stages)


def main() -> int:
    from importlib.resources import files

    entries = sorted(
        p.name[:-4] for p in files("linalg_dsl.ops.catalogue").iterdir() if p.name.endswith(".rec")
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["check", "kernels", "sweep"])
    parser.add_argument("--names", default=",".join(entries))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--sizes", default="small,train")
    parser.add_argument("--gates", default="mild")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--heads", default="0,5,9,15", help="heads that the large shape's reference runs")
    parser.add_argument("--no-nan-exact", action="store_true", help="kernels: that do not look for NaN")
    args = parser.parse_args()
    names = args.names.split(",")
    if args.what == "sweep":
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
            list(pool.map(sweep, names, [args.dtypes.split(",")[0]] * len(names), [False] * len(names)))
        for name in names:
            print("\n".join(sweep(name, args.dtypes.split(",")[0], True)), flush=True)
        return 0
    if args.what == "kernels":
        for name in names:
            print(kernels(name, args.dtypes.split(",")[0], not args.no_nan_exact), flush=True)
        return 0
    jobs = [
        (name, dtype, size, gates, args.heads)
        for size in args.sizes.split(",")
        for dtype in args.dtypes.split(",")
        for gates in args.gates.split(",")
        for name in names
    ]
    failed = 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for line in pool.map(one_check, jobs):
            failed += line.startswith("FAIL")
            print(line, flush=True)
    print(f"{len(jobs) - failed} of {len(jobs)} within the limits", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
