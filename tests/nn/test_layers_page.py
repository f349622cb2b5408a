"""The code of docs/layers.md and docs/comparing.md runs, each page in order as one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["layers", "comparing"])
def test_a_page_runs_and_prints_what_it_shows(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
        shown = re.findall(r"^# (.*)$", block, re.MULTILINE)
        assert capsys.readouterr().out.splitlines() == shown
    if page == "layers":
        assert names["y"].shape == (2, 60, 64)
        assert names["out"].logits.shape == (2, 40, 256)
