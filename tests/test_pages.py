"""The tutorial and the how-tos: their Python runs and prints what they show, their commands are commands."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

from linalg_dsl.cli import app

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]
TOPICS = {
    "new-gate", "new-erase-rule", "value-side", "normaliser", "packed-data", "decoding", "export", "speed",
}  # fmt: skip


def test_every_topic_has_its_page() -> None:
    assert {p.stem for p in PAGES} == TOPICS | {"tutorial"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_runs_and_prints_what_it_shows(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(block, names)
        assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)$", block, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_the_commands_of_a_page_are_commands(page: Path) -> None:
    group = typer.main.get_command(app)
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.splitlines():
            program, command, *arguments = shlex.split(line)
            assert program == "linalg-dsl"
            group.commands[command].make_context(command, arguments)  # type: ignore[attr-defined]
