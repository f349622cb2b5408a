"""The command line: thin commands over the Python API.

Exit status: 0 good, 1 a check failed, 2 bad input.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from linalg_dsl.cli_options import (
    Backend,
    Json,
    MaybeB,
    MaybeH,
    MaybeK,
    MaybeT,
    MaybeV,
    Schedule,
    SizeK,
    SizeV,
    Spec,
    codes,
    names,
)
from linalg_dsl.cli_output import Output, load_spec, use_utf8
from linalg_dsl.errors import ArgumentError, DslError

app = typer.Typer(
    help="Write the recurrence of a sequence mixer in one line; get checked, fused GPU kernels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


FAILED = 1
BAD_INPUT = 2


def main() -> None:
    """Runs the command line; the user's mistakes become messages and exit status 2."""
    use_utf8(sys.stdin, sys.stdout, sys.stderr)
    try:
        app()
    except (DslError, ArgumentError) as error:
        Output("--json" in sys.argv).failure(error)
        sys.exit(BAD_INPUT)


@app.command()
def explain(
    spec: Spec,
    B: MaybeB = None,
    T: MaybeT = None,
    H: MaybeH = None,
    K: MaybeK = None,
    V: MaybeV = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    target: Annotated[str, typer.Option(help="the GPU of the schedule: sm_80, sm_90, gfx942 ...")] = "sm_90",
    latex: Annotated[bool, typer.Option("--latex", help="the derivation as LaTeX")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="write a page with drawings, costs and code to this file")
    ] = None,
    schedule: Schedule = "walk",
    json: Json = False,
) -> None:
    """Derive the chunk form and print it: class, rewrites, equations, costs, stability, schedule.

    With B, T and H the schedule is that of such a call: its launches, their sizes, bytes and reasons.

    \b
    Examples:
      linalg-dsl explain gated_delta_rule
      linalg-dsl explain my.rec --B 8 --T 2048 --H 16 --K 128 --V 128
      linalg-dsl explain kda --html kda.html
      linalg-dsl explain kda --latex
    """
    from linalg_dsl.codegen.options import CompileOptions
    from linalg_dsl.driver import make_plan

    loaded = load_spec(spec)
    plan = make_plan(loaded, CompileOptions(schedule=schedule))
    if latex:
        text = plan.to_latex()
        Output(json).text(text, {"name": loaded.name, "latex": text})
        return
    if html is not None:
        sizes = {n: x for n, x in zip("BTHKV", (B, T, H, K, V), strict=True) if x is not None}
        try:
            written = plan.to_html(html, **sizes, dtype=dtype, target=target)
        except OSError as error:
            raise ArgumentError(f"cannot write {html}: {error}") from None
        Output(json).text(f"wrote {written}", {"name": loaded.name, "path": str(written)})
        return
    found = plan.explain(B=B, T=T, H=H, K=K, V=V, dtype=dtype, target=target)
    text = str(found)
    Output(json).text(text, {**found.to_dict(), "explanation": text})


@app.command(name="compile")
def compile_(
    specs: Annotated[
        list[str] | None,
        typer.Argument(help="a .rec file or a name of the catalogue", autocompletion=names),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="the whole catalogue")] = False,
    target: Annotated[
        list[str] | None, typer.Option(help="sm_80, sm_86, sm_90, sm_100, gfx942 or all; no GPU needed")
    ] = None,
    K: SizeK = 128,
    V: SizeV = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="folder for the generated modules")] = None,
    schedule: Schedule = "walk",
    json: Json = False,
) -> None:
    """Write the generated modules; with --target compile their kernels and print what they take.

    \b
    Examples:
      linalg-dsl compile my.rec --out build
      linalg-dsl compile kda gla --target sm_90
      linalg-dsl compile --all --target all --json
    """
    from linalg_dsl.cli_compile import compile_all
    from linalg_dsl.ops.catalogue import catalogue_names

    wanted = [*(specs or []), *(catalogue_names() if every else ())]
    if not wanted:
        raise ArgumentError("give a .rec file, a name of the catalogue, or --all")
    output = Output(json)
    loaded = [load_spec(name) for name in wanted]
    if not compile_all(loaded, target or [], K, V, dtype, out, output, schedule):
        raise typer.Exit(FAILED)


@app.command()
def check(
    spec: Spec,
    backend: Backend = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; by default a GPU if there is one")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16")] = "float32",
    gates: Annotated[
        str | None, typer.Option(help="mild, slow, strong, resets or zero; by default several")
    ] = None,
    B: MaybeB = None,
    T: MaybeT = None,
    H: MaybeH = None,
    K: MaybeK = None,
    V: MaybeV = None,
    seed: Annotated[int, typer.Option(help="of the random inputs")] = 0,
    text: Annotated[
        Path | None, typer.Option("--text", help="run over the bytes of this file instead of random inputs")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="bytes of the text that are used at most")] = 4096,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="draw the errors over T and strengths of gates")
    ] = None,
    draws: Annotated[
        int, typer.Option(min=0, help="ordinary and extreme inputs of the certificate; 0: no certificate")
    ] = 24,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="write the certificate's worst input to this file")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="run an input that was kept, and nothing else")
    ] = None,
    json: Json = False,
) -> None:
    """Compare output, final state and every gradient with the float64 step loop.

    Without sizes a few shapes and kinds of gates are tried, packed sequences among them, and a numerics
    certificate is made: the worst error of every tensor over inputs at the nasty ends of what is declared,
    element by element. Exit status 1 if an error is beyond its bound; then the smallest input that shows it
    is described, and kept with --keep.

    \b
    Examples:
      linalg-dsl check kda
      linalg-dsl check my.rec --backend triton --gates strong --T 300 --K 64 --V 64
      linalg-dsl check delta_rule --text README.md --length 1000
      linalg-dsl check gla --plot errors.svg
      linalg-dsl check my.rec --draws 200 --keep worst.pt
      linalg-dsl check my.rec --replay worst.pt
    """
    from linalg_dsl.cli_check import (
        Request,
        check_on_text,
        check_over_lengths,
        check_random,
        replay_case,
    )

    request = Request(backend, device, dtype, seed)
    sizes = {n: s for n, s in zip("BTHKV", (B, T, H, K, V), strict=True) if s is not None}
    loaded, output = load_spec(spec), Output(json)
    if replay is not None:
        good = replay_case(loaded, request, replay, output)
    elif plot is not None and (text is not None or gates is not None):
        raise ArgumentError(
            "--plot goes over gates and lengths of random inputs: leave out --text and --gates"
        )
    elif plot is not None and (sizes or not draws):
        if keep is not None:
            raise ArgumentError("--keep keeps the worst input of a certificate: leave out sizes")
        good = check_over_lengths(loaded, request, sizes, plot, output)
    elif text is not None:
        good = check_on_text(loaded, request, text, length, sizes, output)
    else:
        good = check_random(loaded, request, gates, sizes, output, draws, keep, plot)
    if not good:
        raise typer.Exit(FAILED)


@app.command()
def bench(
    specs: Annotated[
        list[str],
        typer.Argument(help="a .rec file or a name of the catalogue", autocompletion=names),
    ],
    backend: Backend = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; by default a GPU if there is one")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="of q, k, v; by default bfloat16 on a GPU, float32 on the CPU")
    ] = None,
    passes: Annotated[
        list[str] | None,
        typer.Option(
            "--pass",
            help="forward, training (with gradients) or decode (one token); by default the first two",
        ),
    ] = None,
    B: MaybeB = None,
    T: Annotated[
        list[int] | None, typer.Option("--T", min=1, help="sequence length; several for plots")
    ] = None,
    H: MaybeH = None,
    K: MaybeK = None,
    V: MaybeV = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="also softmax attention, and fla-core's operators on a GPU")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.01, help="to spend on one measurement")] = 0.2,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="train, long, d64, d256, mid, few, short, small: sizes by name"),
    ] = None,
    head_sizes: Annotated[
        bool, typer.Option("--head-sizes", help="one batch over sizes of K and V: 64 to 256, 128 x 256")
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="also every kernel alone, beside the model's time (GPU)")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="also whether the numbers are right, and equal in 20 runs")
    ] = False,
    schedule: Schedule = "walk",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="a JSON file, written as rows come")] = None,
    plots: Annotated[Path | None, typer.Option("--plots", help="folder for plots, SVG and PNG")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write table and plots as a page")] = None,
    json: Json = False,
) -> None:
    """Measure operators: medians and spread, peak memory, launches, shares of what FLOPs and bytes take.

    `ms` is of calls through torch, `graph ms` of their replay as a CUDA graph (the GPU alone), `predicted ms`
    what the cost model says to that. The two shares say what part of the time the plan's FLOPs, or its
    bytes, alone would take at the rates of a large product and a large copy on the same device. Named shapes
    and --head-sizes are of sizes for a GPU.

    \b
    Examples:
      linalg-dsl bench gated_delta_rule kda --shape train --shape long --peers --out rows.json
      linalg-dsl bench gla --head-sizes
      linalg-dsl bench my.rec --T 512 --T 2048 --T 8192 --peers --html times.html
      linalg-dsl bench delta_rule --device cpu --T 256 --K 32 --V 32 --pass forward --json

    Exit status 1 if numbers that were checked are wrong.
    """
    from linalg_dsl.cli_bench import Wanted, run_bench
    from linalg_dsl.cli_check import Request

    place = Request(backend, device, dtype or "float32").torch_device().type
    chosen = dtype or ("bfloat16" if place == "cuda" else "float32")
    wanted = Wanted(
        B, T or (), H, K, V, passes or (), peers, seconds, shapes or (), head_sizes, kernels, check, schedule
    )
    loaded = [load_spec(name) for name in specs]
    request = Request(backend, device, chosen)
    if not run_bench(loaded, request, wanted, plots, html, Output(json), out):
        raise typer.Exit(FAILED)


@app.command()
def tune(
    specs: Annotated[
        list[str],
        typer.Argument(help=".rec files or names of the catalogue", autocompletion=names),
    ],
    shapes: Annotated[
        list[str] | None, typer.Option("--shape", help="train, long, d64 ...: sizes by name; default train")
    ] = None,
    budget: Annotated[float, typer.Option(min=1, help="seconds for one recurrence and shape")] = 120,
    passes: Annotated[str, typer.Option("--pass", help="training or forward")] = "training",
    dtype: Annotated[str, typer.Option(help="of q, k, v: bfloat16, float16 or float32")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1 ...")] = None,
    json: Json = False,
) -> None:
    """Search for faster block sizes, warps, stages, chunk sizes and schedules than the default ones.

    What is found is kept in the cache directory, and used by `linalg_dsl.compile(..., tune=True)`. A search
    that ended with its budget goes on with the same command.

    \b
    Examples:
      linalg-dsl tune gated_delta_rule --shape train --shape long
      linalg-dsl tune my.rec --budget 300 --json

    Exit status 1 if the default choice of some recurrence does not run.
    """
    from linalg_dsl.cli_check import Request
    from linalg_dsl.cli_tune import run_tune
    from linalg_dsl.ops.bench_shapes import shape_named

    chosen = [(name, shape_named(name)) for name in shapes or ["train"]]
    loaded = [load_spec(name) for name in specs]
    request = Request("triton", device, dtype)
    if not run_tune(loaded, request, chosen, passes, budget, Output(json)):
        raise typer.Exit(FAILED)


@app.command()
def export(
    spec: Spec,
    path: Annotated[Path, typer.Argument(help="the Python file to write")],
    backend: Annotated[str, typer.Option(help="triton or torch")] = "triton",
    step: Annotated[bool, typer.Option("--step", help="also a function that decodes")] = False,
    json: Json = False,
) -> None:
    """Write one file that computes the recurrence and needs only torch and triton.

    \b
    Examples:
      linalg-dsl export kda kda_kernels.py
      linalg-dsl export my.rec mine.py --backend torch --step
    """
    import linalg_dsl

    op = linalg_dsl.compile(load_spec(spec), backend=backend)
    try:
        written = op.export(path, step=step)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error}") from None
    Output(json).text(f"wrote {written}", {"path": str(written), "backend": backend})


@app.command()
def doctor(json: Json = False) -> None:
    """Say what this machine offers and whether each backend works on it.

    \b
    Examples:
      linalg-dsl doctor
      linalg-dsl doctor --json
    """
    from dataclasses import asdict

    from linalg_dsl.cli_doctor import examine

    output = Output(json)
    with output.working("compiling and running a small recurrence"):
        findings = list(examine())
    rows = [asdict(f) for f in findings]
    output.table("", ("what", "status", "found"), rows)
    output.data(rows)
    if any(f.status == "bad" for f in findings):
        raise typer.Exit(FAILED)


@app.command()
def demo(
    text: Annotated[
        Path | None, typer.Option("--text", help="a text to run over, by default the README")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for the generated modules")] = Path(
        "build"
    ),
) -> None:
    """The whole way of the gated delta rule: derivation, kernels, checks, a run over a text.

    \b
    Examples:
      linalg-dsl demo --out build
      linalg-dsl demo --text README.md
    """
    from linalg_dsl.cli_demo import run_demo

    if not run_demo(text, out, Output(False)):
        raise typer.Exit(FAILED)


@app.command()
def sweep(
    specs: Annotated[
        list[str],
        typer.Argument(
            help=".rec files, names of the catalogue, or folders of .rec files", autocompletion=names
        ),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="an edit, 'NAME: alternative, alternative'; several are combined"),
    ] = None,
    B: Annotated[int, typer.Option("--B", min=1, help="batch, for times")] = 2,
    T: Annotated[int, typer.Option("--T", min=1, help="sequence length, for times")] = 2048,
    H: Annotated[int, typer.Option("--H", min=1, help="heads, for times")] = 8,
    K: SizeK = 64,
    V: SizeV = 64,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = "bfloat16",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; by default a GPU if there is one")
    ] = None,
    backend: Backend = "auto",
    check: Annotated[bool, typer.Option(help="compare with the float64 step loop")] = True,
    recall: Annotated[
        int, typer.Option(min=0, help="train on recall for so many steps (900 is enough); 0: do not")
    ] = 0,
    seed: Annotated[int, typer.Option(help="of random inputs and training")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="a JSON file for the rows; run again, it goes on there")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="a CSV file for the table")] = None,
    plots: Annotated[Path | None, typer.Option(help="a folder for bar charts (needs matplotlib)")] = None,
    json: Json = False,
) -> None:
    """Compare variants of a recurrence: class, cost, errors, times on a GPU, memory, recall.

    An edit changes an input, const, state or the output by its name, `gate`, or `rank`:

    linalg-dsl sweep delta_rule --vary "gate: none, scalar, [K], exp(-softplus(a_t))" --vary "rank: 1..3"

    linalg-dsl sweep gla kda --vary "gate: [K], sigmoid(a_t)^(1/16)" --recall 900 --out sweep.json

    Exit status 1 if an error is beyond its bound.
    """
    from linalg_dsl.cli_sweep import Files, run_sweep

    options = {
        "B": B, "T": T, "H": H, "K": K, "V": V, "dtype": dtype, "device": device, "backend": backend,
        "check": check, "recall_steps": recall or None, "seed": seed,
    }  # fmt: skip
    if not run_sweep(specs, vary or [], Files(out, csv, plots), Output(json), options):
        raise typer.Exit(FAILED)


@app.command(name="list")
def list_(json: Json = False) -> None:
    """List the recurrences of the catalogue.

    \b
    Examples:
      linalg-dsl list
      linalg-dsl list --json
    """
    from linalg_dsl.language.printer import show_expr
    from linalg_dsl.ops.catalogue import catalogue_names

    rows = []
    for name in catalogue_names():
        spec = load_spec(name)
        states = {s.name for s in spec.states}
        updates = [e for e in spec.written if e.target in states]
        line = "; ".join(f"{e.target}_t = {show_expr(e.value)}" for e in updates)
        rows.append({"name": name, "update": line, "description": spec.doc})
    output = Output(json)
    output.table("", ("name", "update", "description"), rows, first_line_only=("description",))
    output.data(rows)


@app.command(name="explain-error")
def explain_error(
    code: Annotated[
        str | None, typer.Argument(help="such as E302; without one, all codes", autocompletion=codes)
    ] = None,
    json: Json = False,
) -> None:
    """Say what a code of a mistake means, with a wrong and a right example.

    \b
    Examples:
      linalg-dsl explain-error
      linalg-dsl explain-error E302
    """
    from linalg_dsl.cli_errors import error_page, overview

    text, data = overview() if code is None else error_page(code)
    Output(json).text(text, data)
