"""Measurements on the CPU: what a row says, and the command that prints it."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import linalg_dsl
from linalg_dsl import plots
from linalg_dsl.cli import app
from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.bench import (
    USUAL,
    Rates,
    Row,
    Shape,
    device_rates,
    inputs_of,
    measure_op,
    time_call,
    work_of_op,
)
from linalg_dsl.ops.peers import attention_call

CPU = torch.device("cpu")
SHAPE = Shape(1, 24, 2, 8, 16)


def rows(name: str = "gated_delta_rule") -> list[Row]:
    op = linalg_dsl.compile(getattr(linalg_dsl.ops, name).spec)
    return list(measure_op(op, SHAPE, torch.float32, CPU, USUAL, Rates(1e9, 1e9), budget=0.02))


def test_a_row_for_every_pass_with_shares_of_its_time() -> None:
    forward, training = rows()
    assert [forward.passes, training.passes] == list(USUAL)
    op = linalg_dsl.compile(linalg_dsl.ops.gated_delta_rule.spec)
    work = work_of_op(op, SHAPE, torch.float32)
    lanes = SHAPE.B * SHAPE.T * SHAPE.H
    assert forward.flops == lanes * work.forward_flops
    assert training.moved == lanes * (work.forward_bytes + work.backward_bytes)
    for row in (forward, training):
        assert row.low <= row.ms <= row.high
        assert row.flop_share == pytest.approx(row.flops / 1e9 / (row.ms / 1000))
        assert row.byte_share == pytest.approx(row.moved / 1e9 / (row.ms / 1000))
        assert (row.backend, row.peak, row.launches) == ("torch", None, None)


def test_stages_are_counted_together_and_launches_by_the_plan() -> None:
    op = linalg_dsl.compile(linalg_dsl.ops.gsa.spec)
    parts = [plan.work(k, v) for plan, k, v in op.plan.sized_stages(8, 16)]
    assert len(parts) == 2
    whole = work_of_op(op, SHAPE, torch.bfloat16)
    assert whole.forward_flops == sum(p.forward_flops for p in parts)
    forward, backward = op.plan.launches()
    assert forward == sum(len(p.kernels.forward) for p in op.plan.stages)
    assert backward == sum(len(p.kernels.backward) for p in op.plan.stages)


def test_decoding_moves_the_states_and_one_token() -> None:
    op = linalg_dsl.compile(linalg_dsl.ops.gated_delta_rule.spec)
    (row,) = measure_op(op, SHAPE, torch.float32, CPU, ("decode",), Rates(1e9, 1e9), budget=0.02)
    lanes, K, V = SHAPE.B * SHAPE.H, SHAPE.K, SHAPE.V
    assert row.moved == lanes * (2 * 4 * K * V + 4 * (2 * K + 2 * V + 2))
    assert row.flops >= lanes * 3 * 2 * K * V  # erase, write and read
    assert row.passes == "decode"


def test_gates_are_float32_and_the_rest_as_asked() -> None:
    made = inputs_of(linalg_dsl.ops.gated_delta_rule.spec, SHAPE, torch.bfloat16, CPU)
    kinds = {n: x.dtype for n, x in made.items()}
    assert kinds == dict.fromkeys("qkv", torch.bfloat16) | {"g": torch.float32, "beta": torch.float32}


def test_a_slower_call_takes_longer() -> None:
    x = torch.randn(400, 400)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(x, x)

    short, long = (time_call(partial(products, n), CPU, 0.05) for n in (1, 12))
    assert long.median > 2 * short.median


def test_rates_are_those_of_a_machine() -> None:
    found = device_rates(CPU, torch.float32)
    assert 1e8 < found.flops < 1e16
    assert 1e8 < found.bandwidth < 1e14


def test_attention_is_causal_and_has_the_layout_of_an_op() -> None:
    q, k, v = (torch.randn(1, 6, 2, 4) for _ in range(3))
    o = attention_call(q, k, v)
    assert o.shape == v.shape
    torch.testing.assert_close(o[:, 0], v[:, 0])


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout


SMALL = ("--device", "cpu", "--B", "1", "--H", "1", "--K", "8", "--V", "8", "--seconds", "0.01")


def test_the_command_prints_json_of_every_length_and_pass() -> None:
    status, printed = run("bench", "gla", *SMALL, "--T", "8", "--T", "16", "--peers", "--json")
    assert status == 0
    data = json.loads(printed)
    assert [(r["operator"], r["T"], r["passes"]) for r in data["rows"]] == [
        (name, t, p) for t in (8, 16) for name in ("gla", "attention (SDPA)") for p in USUAL
    ]
    assert data["flops_per_second"] > 0


def test_an_unknown_pass_is_refused() -> None:
    done = CliRunner().invoke(app, ["bench", "gla", *SMALL, "--pass", "sideways"])
    assert isinstance(done.exception, ArgumentError)
    assert "forward, training" in str(done.exception)


def test_plots_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    page = tmp_path / "times.html"
    options = ("--T", "8", "--T", "16", "--plots", str(tmp_path / "plots"), "--html", str(page))
    status, _ = run("bench", "gla", *SMALL, *options, "--peers")
    assert status == 0
    written = {p.name for p in (tmp_path / "plots").iterdir()}
    assert written == {
        f"{n}.{e}" for n in ("time_forward", "time_training", "roofline") for e in ("svg", "png")
    }
    tree = ET.fromstring(page.read_text(encoding="utf-8").split("\n", 1)[1])
    images = [e.attrib["src"] for e in tree.iter() if e.tag == "img"]
    assert len(images) == 3
    assert all(src.startswith("data:image/svg+xml;base64,") for src in images)


def test_check_plots_errors_over_lengths(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from linalg_dsl import cli_check

    path = tmp_path / "errors.svg"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_check, "LENGTHS", (4, 9))
        status, _ = run("check", "retnet", "--K", "4", "--V", "4", "--plot", str(path), "--device", "cpu")
    assert status == 0
    assert "<svg" in path.read_text(encoding="utf-8")


# -- plots --------------------------------------------------------------------------------------------------
def line(name: str, times: dict[int, float]) -> list[dict[str, object]]:
    return [
        {"operator": name, "passes": "training", "T": t, "ms": ms, "low": ms, "high": ms, "peak": None,
         "flops": 1e9, "moved": 1e8}
        for t, ms in times.items()
    ]  # fmt: skip


def test_the_crossing_is_where_a_line_falls_below_another_for_good() -> None:
    ours = [(float(t), float(t)) for t in (64, 128, 256, 512)]
    theirs = [(t, t * t / 100) for t, _ in ours]
    found = plots.crossing(ours, theirs)
    assert found is not None
    assert math.isclose(found[0], 100, rel_tol=1e-9)
    assert plots.crossing(theirs, ours) is None
    assert plots.crossing(ours[:1], theirs) is None


def test_plots_hold_their_lines_and_mark_the_crossing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    rows = [*line("mine", {64: 64, 256: 256}), *line("attention (SDPA)", {64: 41, 256: 656})]
    figure = plots.time_over_length(rows)
    (axes,) = figure.axes
    labels = [str(x.get_label()) for x in axes.lines]
    assert [x for x in labels if not x.startswith("_")] == ["mine", "attention (SDPA)"]
    assert any("T = 100" in t.get_text() for t in axes.texts)
    assert plots.save(figure, tmp_path / "x.png").stat().st_size > 5000
    ET.fromstring(plots.svg(figure))
    assert len(plots.roofline(rows, 1e13, 1e12).axes[0].lines) == 3
    with pytest.raises(ArgumentError, match=r"\.png or \.svg"):
        plots.save(figure, tmp_path / "x.pdf")
    with pytest.raises(ArgumentError, match="on GPUs only"):
        plots.memory_over_length(rows)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match=r"linalg-dsl\[plot\]"):
        plots.errors([])


def test_spreads_and_bars_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plots.spread(
        {"a": [(2, 0.5), (2, 0.7), (4, 1.0)], "b": [(4, 0.2)]}, "pairs", "right", log_x=True
    )
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["2", "4"]
    (means, *_), *_ = axes.containers
    assert means.get_ydata().tolist() == pytest.approx([0.6, 1.0])
    assert plots.save(figure, tmp_path / "spread.svg").stat().st_size > 1000
    drawn = plots.bars({"first": 3.0, "second": 5.0}, "FLOP").axes[0]
    assert [t.get_text() for t in drawn.get_yticklabels()] == ["second", "first"]
