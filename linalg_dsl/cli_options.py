"""Arguments and options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def names(incomplete: str) -> list[str]:
    """For completion: names of the catalogue, and recurrences in files here."""
    from linalg_dsl.ops.catalogue import catalogue_names

    found = [*catalogue_names(), *(p.name for p in Path().glob("*.rec"))]
    return [name for name in found if name.startswith(incomplete)]


def codes(incomplete: str) -> list[str]:
    from linalg_dsl.language.codes import EXPLANATIONS

    return [code for code in EXPLANATIONS if code.startswith(incomplete.upper())]


Spec = Annotated[
    str,
    typer.Argument(
        help="a .rec file, a name of the catalogue, or - for standard input", autocompletion=names
    ),
]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output")]
SizeK = Annotated[int, typer.Option("--K", min=1, max=512, help="size of the key axis")]
SizeV = Annotated[int, typer.Option("--V", min=1, max=512, help="size of the value axis")]
MaybeB = Annotated[int | None, typer.Option("--B", min=0, help="batch")]
MaybeT = Annotated[int | None, typer.Option("--T", min=0, help="sequence length")]
MaybeH = Annotated[int | None, typer.Option("--H", min=1, help="heads")]
MaybeK = Annotated[int | None, typer.Option("--K", min=1, max=512, help="size of the key axis")]
MaybeV = Annotated[int | None, typer.Option("--V", min=1, max=512, help="size of the value axis")]
Backend = Annotated[str, typer.Option(help="auto, triton, torch or reference")]
Schedule = Annotated[str, typer.Option(help="walk, two_level, or auto: the choice of a model of their time")]
