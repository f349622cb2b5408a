"""Five faults of the list run again, and the table of docs/mutants.md is the one of this list."""

from __future__ import annotations

import re

import pytest
from edits import NothingToEdit, Rewrite, edited
from mutant import version
from mutants import MODULES, MUTANTS, PAGE, examine

AGAIN = (
    "neumann_series", "lost_gradient_path", "packed_from_the_first_state", "int32_offsets",
    "final_state_gradient_dropped",
)  # fmt: skip
"""One of the loops over chunks, one of a plan, one of packed sequences, a static one, one in a kernel."""
KNOWN = {m.name: m for m in MUTANTS}


@pytest.mark.parametrize("name", AGAIN)
def test_the_kit_finds_a_fault_of_the_list(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINALG_DSL_SELFCHECK", "0")  # the known answers would find it first
    assert examine(KNOWN[name]).killer is not None


def test_the_table_is_of_this_list() -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = re.search(r"List ([0-9a-f]{8}): (\d+) faults, of which the kit found (\d+)", text)
    assert told is not None
    assert told.group(1) == version(MODULES), "the list has changed since: make mutants"
    assert told.group(2) == told.group(3) == str(len(MUTANTS))
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(KNOWN)
    assert len(KNOWN) == len(MUTANTS) >= 40


def test_an_edit_that_changes_nothing_is_an_error() -> None:
    text = "def f(x):\n    return x + 1\n"
    assert edited(text, (Rewrite("_a + 1", "_a + 2"),)) == "def f(x):\n    return x + 2\n"
    with pytest.raises(NothingToEdit):
        edited(text, (Rewrite("_a - 1", "_a + 2"),))
    with pytest.raises(NothingToEdit):
        edited(text, (Rewrite("_a + 1", "_a + 1"),))
