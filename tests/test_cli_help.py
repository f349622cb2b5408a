"""The help of every command shows examples, and these are true; names and codes complete."""

from __future__ import annotations

import re
import shlex

import pytest
import typer

from linalg_dsl.cli import app
from linalg_dsl.cli_options import codes, names

GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)  # type: ignore[attr-defined]


def examples(name: str) -> list[str]:
    text = GROUP.commands[name].help or ""  # type: ignore[attr-defined]
    return re.findall(r"^ *(linalg-dsl .*)$", text, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_its_options_allow(name: str) -> None:
    assert examples(name), f"{name} --help has no examples"
    for line in examples(name):
        _, command, *arguments = shlex.split(line)
        assert command == name
        GROUP.commands[name].make_context(name, arguments)  # type: ignore[attr-defined] # raises on misuse


def test_names_and_codes_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))
    assert names("gated_del") == ["gated_delta_product", "gated_delta_rule"]
    assert "E302" in codes("e3")
    assert not codes("E6")
