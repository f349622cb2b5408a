"""Python files as modules: Triton reads a kernel's source from its file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of_file(path: Path, name: str | None = None) -> ModuleType:
    """The Python file at ``path`` imported under ``name`` (by default the file's own), anew at each call."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def module_of_text(folder: Path, name: str, text: str) -> ModuleType:
    """Writes ``text`` to ``folder``/``name``.py and imports it under that name."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return module_of_file(path)
