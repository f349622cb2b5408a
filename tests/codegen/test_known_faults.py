"""The list of known faults names a version on a device, and nothing that was fixed."""

from __future__ import annotations

import pytest

from linalg_dsl.codegen.known_faults import FAULTS, known_faults


@pytest.mark.parametrize(
    ("triton", "architecture", "issues"),
    [
        ("3.3.1", 9, []),
        ("3.4.0", 9, ["640", "984"]),
        ("3.6.0", 9, ["640", "984"]),
        ("3.7.0", 9, ["640", "984"]),
        ("3.7.1", 9, []),
        ("3.8.0+git1", 9, []),
        ("3.7.0", 8, []),
        ("3.7.1", 10, ["913", "1228"]),
    ],
)
def test_a_pair_has_its_issues(triton: str, architecture: int, issues: list[str]) -> None:
    found = " ".join(known_faults(triton, architecture))
    assert [n for n in ("640", "984", "913", "1228") if f"issue {n}" in found] == issues


def test_every_fault_ends_after_it_begins() -> None:
    assert all(f.fixed is None or f.first < f.fixed for f in FAULTS)
