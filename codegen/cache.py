"""Generated modules as real files in a directory of the user's own, imported by path.

Tracebacks, profilers and Triton (which reads a kernel's source from its file) then see real code. The
directory is ``$LINALG_DSL_CACHE`` or ``linalg_dsl`` in the user's cache directory; it and the files
belong to the user alone (0700, 0600), a file is put in place by an atomic rename, and what is already
there is used only if it is the user's own regular file with exactly the expected text.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import stat
import sys
import tempfile
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from linalg_dsl.errors import InternalError

ENVIRONMENT_VARIABLE = "LINALG_DSL_CACHE"
_LOCK = threading.RLock()
_LOADED: dict[Path, ModuleType] = {}


class CacheError(RuntimeError):
    """The cache directory, or a file in it, is not safe to use."""


def module_key(text: str) -> str:
    """32 hex digits of everything that a module's meaning depends on: its text and the tool versions."""
    parts = [f"linalg_dsl {version('linalg_dsl')}", toolchain(), text]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def toolchain() -> str:
    """The versions that generated code runs on."""
    found = []
    for package in ("torch", "triton"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} none")
    return f"{', '.join(found)}, Python {platform.python_version()}"


def load_module(name: str, text: str) -> ModuleType:
    """The module with this text, imported from its file; the same object for the same text.

    ``name`` (a spec's, made an identifier by the caller) appears in the file's name, and so in tracebacks
    and profiles. Raises ``CacheError`` if the directory is not the user's own.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,100}", name):
        raise InternalError(f"{name!r} is not a name for a module")
    path = cache_directory() / f"{name}_{module_key(text)}.py"
    with _LOCK:
        module = _LOADED.get(path)
        if module is None:
            if not _holds(path, text):
                _write(path, text)
            module = _LOADED[path] = _import(path)
        return module


def private_copy(module: ModuleType) -> ModuleType:
    """The same file imported once more: what is set in it changes nothing for others.

    A module without a file is given back as it is.
    """
    path = getattr(module, "__file__", None)
    return module if path is None else _import(Path(path), f"{module.__name__}_copy")


def recorded(name: str) -> bool:
    """Whether ``record`` noted this name, in this process or another."""
    path = cache_directory() / _record_file(name)
    return path.is_file() and _is_own(path.lstat())


def record(name: str, text: str) -> None:
    """Notes a name (digits and letters) with a text for people, in the cache directory."""
    _write(cache_directory() / _record_file(name), text)


def read_note(name: str) -> str | None:
    """The text noted under a name by ``write_note``; None where there is none of the user's own."""
    path = cache_directory() / _note_file(name)
    try:
        return path.read_text(encoding="utf-8") if _is_own(path.lstat()) else None
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def write_note(name: str, text: str) -> None:
    """Notes a text under a name (digits and letters) in the cache directory, in place of what was there."""
    _write(cache_directory() / _note_file(name), text)


def _note_file(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]{1,180}", name):
        raise InternalError(f"{name!r} is not a name for a note")
    return f"{name}.json"


def records() -> int:
    """How many names are noted."""
    return sum(1 for _ in cache_directory().glob("*.checked"))


def _record_file(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_]{1,180}", name):
        raise InternalError(f"{name!r} is not a name for a record")
    return f"{name}.checked"


def cache_directory() -> Path:
    """The directory of generated modules, made if need be and checked to be the user's alone."""
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    path = Path(given).expanduser() if given else _user_cache() / "linalg_dsl"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise CacheError(
            f"cannot make the cache directory {path} ({error.strerror}); set {ENVIRONMENT_VARIABLE} to a "
            "directory that you can write"
        ) from error
    if hasattr(os, "getuid"):
        if found.st_uid != os.getuid():
            raise CacheError(f"cache directory {path} belongs to another user; set {ENVIRONMENT_VARIABLE}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CacheError(
                f"cache directory {path} can be written by others (mode {stat.S_IMODE(found.st_mode):o}); "
                f"run chmod 700 on it or set {ENVIRONMENT_VARIABLE}"
            )
    return path


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _holds(path: Path, text: str) -> bool:
    """Whether the file is there, the user's own, unlinked elsewhere, and has this text."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise CacheError(f"{path} is not a regular file")
    if not _is_own(found):
        raise CacheError(f"{path} belongs to another user or can be written by others")
    return path.read_bytes() == text.encode()


def _is_own(found: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _write(path: Path, text: str) -> None:
    """A temporary file (made with mode 0600) beside the target, renamed onto it."""
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _import(path: Path, name: str | None = None) -> ModuleType:
    name = name or f"linalg_dsl_generated.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InternalError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
