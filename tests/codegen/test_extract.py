"""A part of a module holds what it needs, and runs alone."""

from __future__ import annotations

import pytest

from linalg_dsl.codegen.extract import part_of
from linalg_dsl.errors import InternalError

MODULE = '''# About the module.

import math
from os import path

SIZE = 3
OTHER = 4


def decorate(f):
    return f


@decorate
def helper(x):
    """Twice."""
    return 2 * x


def forward(x):
    return helper(x) + SIZE


def backward(x):
    return math.sqrt(x) + OTHER
'''


def test_part_has_what_it_uses_and_nothing_else() -> None:
    text = part_of(MODULE, "forward")
    assert "# About the module." in text
    assert "def helper" in text
    assert "@decorate" in text
    assert "def decorate" in text
    assert "SIZE = 3" in text
    assert "OTHER" not in text
    assert "backward" not in text
    scope: dict[str, object] = {}
    exec(text, scope)
    assert scope["forward"](5) == 13  # type: ignore[operator]


def test_unknown_part_is_a_fault() -> None:
    with pytest.raises(InternalError, match="sideways"):
        part_of(MODULE, "sideways")
