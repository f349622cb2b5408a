"""The page of other projects' faults names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "pitfalls.md"


def test_every_fault_has_tests_that_there_are() -> None:
    rows = [
        line.split("|")[1:-1]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    rows = [row for row in rows if row[0].strip() != "reports"]
    assert len(rows) >= 40
    for reports, _, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", tests)
        assert named, reports
        for file, test in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not test or f"def {test}(" in text, f"{file}::{test}"
