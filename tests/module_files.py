"""Python files as modules: Triton reads a kernel's source from its file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def module_of_text(folder: Path, name: str, text: str) -> ModuleType:
    """Writes ``text`` to ``folder``/``name``.py and imports it under that name."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
