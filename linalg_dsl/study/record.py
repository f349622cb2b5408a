"""Rows of results in a JSON file, kept as they come, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from linalg_dsl.errors import ArgumentError


class Record:
    """``rows`` of one set of ``settings`` (plain data), in a file at ``path``; None keeps them in memory.

    Several processes may keep rows in one file: each adds its own to those that are there. A file of other
    settings is begun anew, unless ``strict``: then that raises ``ArgumentError``.
    """

    def __init__(self, path: str | Path | None, settings: Mapping[str, Any], *, strict: bool = False) -> None:
        self.path = None if path is None else Path(path)
        self.settings: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        self.rows: list[dict[str, Any]] = []
        before, rows = self._there()
        if before == self.settings:
            self.rows = rows
        elif strict and before is not None:
            differing = sorted(k for k in {*before, *self.settings} if before.get(k) != self.settings.get(k))
            raise ArgumentError(
                f"{self.path} is of a run with other settings ({', '.join(differing)}); "
                "name another file or delete it"
            )

    def _there(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Settings and rows of the file; None without one."""
        if self.path is None or not self.path.exists():
            return None, []
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return dict(found["settings"]), list(found["rows"])
        except (ValueError, KeyError, TypeError):
            raise ArgumentError(f"{self.path} is no record of an earlier run; name another file") from None

    def has(self, **values: Any) -> bool:
        """Whether some row has these values."""
        return bool(self.where(**values))

    def where(self, **values: Any) -> list[dict[str, Any]]:
        """The rows that have these values."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in values.items())]

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Appends rows and writes the file, whole or not at all."""
        new = [dict(r) for r in rows]
        if self.path is None:
            self.rows += new
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            self._write(new)

    def _write(self, new: list[dict[str, Any]]) -> None:
        assert self.path is not None
        settings, rows = self._there()
        self.rows = [*(rows if settings == self.settings else self.rows), *new]
        text = json.dumps({"settings": self.settings, "rows": self.rows}, indent=1, ensure_ascii=False)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.path)

    def write_csv(self, path: str | Path) -> Path:
        """The rows as CSV, with the columns of all."""
        target = Path(path)
        columns = list(dict.fromkeys(k for r in self.rows for k in r))
        with target.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)
        return target
