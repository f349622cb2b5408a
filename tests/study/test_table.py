"""Sweeps: what the table holds, going on after an interruption, files, and the command."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import linalg_dsl as ld
from linalg_dsl.cli import app
from linalg_dsl.errors import ArgumentError
from linalg_dsl.study import table
from linalg_dsl.study.costs import costs
from linalg_dsl.study.tasks import Recall

EDIT = "gate: none, [K], exp(-softplus(a_t))"


def test_the_table_has_class_cost_and_errors() -> None:
    found = ld.sweep("delta_rule", EDIT, K=32, V=32)
    assert [r["variant"] for r in found.rows] == [
        f"gate: {x}" for x in ("none", "[K]", "exp(-softplus(a_t))")
    ]
    assert [r["class"] for r in found.rows] == [
        f"{x} + rank 1" for x in ("linear", "diagonal gate", "scalar gate")
    ]
    assert found.ok
    assert all(0 < r["error"] < r["bound"] for r in found.rows)
    assert [r["state_bytes"] for r in found.rows] == [4096] * 3
    assert found.rows[1]["bytes"] > found.rows[2]["bytes"] > found.rows[0]["bytes"]
    printed = str(found).splitlines()
    assert len(printed) == 4
    assert "recall" not in printed[0]


def test_costs_are_those_that_explain_prints_added_up_over_stages() -> None:
    op = ld.compile(ld.ops.gated_delta_rule.spec)
    found = costs(op, 128, 128)
    (stage,) = op.plan.explain(K=128, V=128).stages
    forward = next(x for x in stage.costs if x.startswith("forward"))
    assert f"{found.forward_bytes:,.0f} bytes" in forward
    slots = costs(ld.compile(ld.ops.gsa.spec), 32, 16)
    assert slots.state == 4 * (32 * 64 + 64 * 16)


def test_an_interrupted_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sweep.json"
    calls: list[str] = []
    fill = table._fill

    def counted(row: dict[str, object], *rest: object) -> None:
        if len(calls) == 2:
            calls.append("stop")
            raise KeyboardInterrupt
        calls.append(str(row["variant"]))
        fill(row, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(table, "_fill", counted)
    with pytest.raises(KeyboardInterrupt):
        ld.sweep("delta_rule", EDIT, out=out, check=False)
    assert len(json.loads(out.read_text())["rows"]) == 2
    seen: list[tuple[int, int, str]] = []
    found = ld.sweep("delta_rule", EDIT, out=out, check=False, progress=lambda *x: seen.append(x))
    assert calls == ["gate: none", "gate: [K]", "stop", "gate: exp(-softplus(a_t))"]
    assert len(found.rows) == 3
    assert seen[-1] == (3, 3, "")
    with pytest.raises(ArgumentError, match=r"other settings \(K\)"):
        ld.sweep("delta_rule", EDIT, out=out, check=False, K=8)


def test_what_cannot_be_compiled_is_a_row_with_its_problem(tmp_path: Path) -> None:
    found = ld.sweep("gla", "gate: [K], tanh(S_{t-1})", check=False)
    assert [r["problem"] is None for r in found.rows] == [True, False]
    assert "E" in found.rows[1]["problem"]
    with pytest.raises(ArgumentError, match="gla has no 'decay'"):
        ld.sweep("gla", "decay: [K]")
    with pytest.raises(ArgumentError, match=r"no \.rec file"):
        ld.sweep(tmp_path)


def test_a_folder_of_specs_and_files_of_results(tmp_path: Path) -> None:
    for name in ("gla", "retnet"):
        (tmp_path / f"{name}.rec").write_text(str(getattr(ld.ops, name).spec), encoding="utf-8")
    found = ld.sweep(tmp_path, check=False)
    assert [r["variant"] for r in found.rows] == ["gla", "retnet"]
    rows = list(csv.DictReader(found.write_csv(tmp_path / "t.csv").open(encoding="utf-8")))
    assert [r["class"] for r in rows] == ["diagonal gate", "scalar gate"]
    assert json.loads(found.write_json(tmp_path / "t.json").read_text(encoding="utf-8")) == list(found.rows)
    pytest.importorskip("matplotlib")
    assert {p.name for p in found.plot(tmp_path / "plots")} == {"forward_flops.png", "state_bytes.png"}


def test_recall_is_trained_for_the_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TASK", Recall(pairs=1, symbols=8))
    found = ld.sweep("delta_rule", check=False, recall_steps=40)
    assert found.rows[0]["recall"] > 0.3  # one in four by chance, none at the start


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner()
    files = ["--csv", str(tmp_path / "t.csv"), "--out", str(tmp_path / "t.json")]
    done = run.invoke(app, ["sweep", "retnet", "gla", "--vary", "rank: 1, 2", "--no-check", *files])
    assert done.exit_code == 0, done.output
    assert "gla; rank: 2" in done.output
    again = run.invoke(
        app, ["sweep", "retnet", "gla", "--vary", "rank: 1, 2", "--no-check", "--json", *files]
    )
    rows = json.loads(again.stdout)
    assert [r["variant"] for r in rows] == [f"{n}; rank: {r}" for n in ("retnet", "gla") for r in (1, 2)]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(table, "_fill", interrupted)
    stopped = run.invoke(app, ["sweep", "kda", "--out", str(tmp_path / "other.json")])
    assert stopped.exit_code == 130
    assert "the same command goes on from" in " ".join(stopped.output.split())
    bad = run.invoke(app, ["sweep", "gla", "--vary", "nothing"])
    assert isinstance(bad.exception, ArgumentError)
