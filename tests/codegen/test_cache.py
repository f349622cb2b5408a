"""Generated modules are the user's own files, written whole, and read only when they are safe."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from linalg_dsl.codegen import cache
from linalg_dsl.codegen.cache import CacheError, cache_directory, load_module, module_key
from linalg_dsl.errors import InternalError

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX file rights")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "deep" / "cache"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(path))
    monkeypatch.setattr(cache, "_LOADED", {})
    return path


def _file(place: Path) -> Path:
    (found,) = place.glob("*.py")
    return found


def test_module_is_imported_from_a_file_with_its_name(place: Path) -> None:
    module = load_module("gated", "X = 42\n")
    assert module.X == 42
    assert module.__file__ == str(_file(place))
    assert _file(place).name.startswith("gated_")
    assert not list(place.glob(".*"))


@posix
def test_only_the_user_can_read_and_write(place: Path) -> None:
    old = os.umask(0)
    try:
        load_module("gated", "X = 1\n")
    finally:
        os.umask(old)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(_file(place).stat().st_mode) == 0o600


def test_same_text_is_one_module_and_another_text_another(place: Path) -> None:
    first = load_module("gated", "X = 1\n")
    assert load_module("gated", "X = 1\n") is first
    assert load_module("gated", "X = 2\n").X == 2
    assert len(list(place.glob("*.py"))) == 2


def test_key_depends_on_text_and_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    key = module_key("X = 1\n")
    assert key != module_key("X = 2\n")
    monkeypatch.setattr(cache, "toolchain", lambda: "torch 0")
    assert key != module_key("X = 1\n")


def test_a_changed_file_is_written_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_module("gated", "X = 1\n")
    _file(place).write_text("X = 666\n")
    monkeypatch.setattr(cache, "_LOADED", {})
    assert load_module("gated", "X = 1\n").X == 1
    assert _file(place).read_text() == "X = 1\n"


@posix
def test_a_directory_that_others_can_write_is_refused(place: Path) -> None:
    place.mkdir(parents=True)
    place.chmod(0o777)
    with pytest.raises(CacheError, match="chmod 700"):
        cache_directory()


@posix
def test_a_link_in_place_of_a_module_is_refused(place: Path, tmp_path: Path) -> None:
    load_module("gated", "X = 1\n")
    path = _file(place)
    target = tmp_path / "elsewhere.py"
    target.write_text("X = 1\n")
    path.unlink()
    path.symlink_to(target)
    cache._LOADED.clear()
    with pytest.raises(CacheError, match="not a regular file"):
        load_module("gated", "X = 1\n")


@posix
def test_a_file_that_others_can_write_is_refused(place: Path) -> None:
    load_module("gated", "X = 1\n")
    _file(place).chmod(0o666)
    cache._LOADED.clear()
    with pytest.raises(CacheError, match="written by others"):
        load_module("gated", "X = 1\n")


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=cache.ENVIRONMENT_VARIABLE):
        load_module("gated", "X = 1\n")


@pytest.mark.parametrize("name", ["../x", "a b", "", "1x", "x" * 200])
def test_names_cannot_lead_elsewhere(place: Path, name: str) -> None:
    with pytest.raises(InternalError):
        load_module(name, "X = 1\n")


def test_a_module_that_fails_leaves_nothing_imported(place: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        load_module("broken", "1 / 0\n")
    assert not [n for n in sys.modules if n.startswith("linalg_dsl_generated.broken")]


def test_many_threads_get_one_module(place: Path) -> None:
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(load_module("gated", "X = 3\n"))) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_processes_that_write_at_once_all_get_the_module(place: Path) -> None:
    code = (
        "from linalg_dsl.codegen.cache import load_module; print(load_module('gated', 'X = 5\\n' * 2000).X)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [p.communicate()[0].strip() for p in running] == ["5"] * 3
