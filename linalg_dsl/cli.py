"""The command line: thin commands over the Python API.

Exit status: 0 good, 1 a check failed, 2 bad input.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from linalg_dsl.cli_output import Output, load_spec
from linalg_dsl.errors import ArgumentError, DslError

app = typer.Typer(
    help="Write the recurrence of a sequence mixer in one line; get checked, fused GPU kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Spec = Annotated[str, typer.Argument(help="a .rec file, a name of the catalogue, or - for standard input")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]
SizeK = Annotated[int, typer.Option("--K", min=1, max=512, help="size of the key axis")]
SizeV = Annotated[int, typer.Option("--V", min=1, max=512, help="size of the value axis")]


def main() -> None:
    """Runs the command line; the user's mistakes become messages and exit status 2."""
    try:
        app()
    except (DslError, ArgumentError) as error:
        Output("--json" in sys.argv).failure(error)
        sys.exit(2)


@app.command()
def explain(
    spec: Spec,
    B: Annotated[int | None, typer.Option("--B", min=0, help="batch")] = None,
    T: Annotated[int | None, typer.Option("--T", min=0, help="sequence length")] = None,
    H: Annotated[int | None, typer.Option("--H", min=1, help="heads")] = None,
    K: Annotated[int | None, typer.Option("--K", min=1, max=512, help="size of the key axis")] = None,
    V: Annotated[int | None, typer.Option("--V", min=1, max=512, help="size of the value axis")] = None,
    latex: Annotated[bool, typer.Option("--latex", help="the derivation as LaTeX")] = False,
    json: Json = False,
) -> None:
    """Derive the chunk form and print it: class, rewrites, equations, costs, stability."""
    import linalg_dsl

    op = linalg_dsl.compile(load_spec(spec))
    text = op.plan.to_latex() if latex else str(op.plan.explain(B=B, T=T, H=H, K=K, V=V))
    Output(json).text(text, {"name": op.spec.name, "latex" if latex else "explanation": text})


@app.command(name="list")
def list_(json: Json = False) -> None:
    """List the recurrences of the catalogue."""
    from linalg_dsl.language.printer import show_expr
    from linalg_dsl.ops.catalogue import catalogue_names

    rows = []
    for name in catalogue_names():
        spec = load_spec(name)
        update = next(e for e in spec.written if e.target == spec.states[0].name)
        line = f"{update.target}_t = {show_expr(update.value)}"
        rows.append({"name": name, "update": line, "description": spec.doc})
    Output(json).table("Catalogue", ("name", "update", "description"), rows, first_line_only=("description",))


@app.command(name="explain-error")
def explain_error(code: str, json: Json = False) -> None:
    """Say what a code of a mistake, such as E302, means."""
    from linalg_dsl.language.codes import EXPLANATIONS

    found = EXPLANATIONS.get(code.upper())
    if found is None:
        known = ", ".join(sorted(EXPLANATIONS))
        raise ArgumentError(f"there is no code {code!r}; the codes are {known}")
    paragraph = " ".join(found.split())
    Output(json).text(f"{code.upper()}: {paragraph}", {"code": code.upper(), "explanation": paragraph})
