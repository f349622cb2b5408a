"""Measurements on the CPU: what a row says, and the command that prints it."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from module_files import module_of_file
from typer.testing import CliRunner

import linalg_dsl
from linalg_dsl import plots
from linalg_dsl.cli import app
from linalg_dsl.codegen.targets import TARGETS
from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.bench import (
    USUAL,
    Rates,
    Row,
    Shape,
    device_rates,
    inputs_of,
    measure_op,
    predicted_times,
    time_call,
    work_of_op,
)
from linalg_dsl.ops.bench_check import nan_filled, verdict
from linalg_dsl.ops.bench_shapes import SHAPES
from linalg_dsl.ops.peers import attention_call, recorded_rows

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


# -- predictions, checks, named shapes -----------------------------------------------------------------
def test_a_prediction_is_of_every_launch_and_at_least_its_bytes() -> None:
    target = TARGETS["sm_90"]
    for name in ("gla", "kda", "gsa"):
        op = linalg_dsl.compile(getattr(linalg_dsl.ops, name).spec)
        found = predicted_times(op, SHAPES["train"], torch.bfloat16, target)
        assert found is not None
        for plan, key, value in op.plan.sized_stages(128, 128):
            parts = plan.predictions(8, 2048, 16, key, value, "bfloat16", target)
            assert len(parts) == len(plan.kernels.forward) + len(plan.kernels.backward)
            assert all(p.microseconds >= p.moved / target.bandwidth for _, _, p in parts)
        assert 0.05 < found[0] < found[1] < 20  # milliseconds
    mamba1 = linalg_dsl.compile(linalg_dsl.ops.mamba1.spec)
    assert predicted_times(mamba1, SHAPES["train"], torch.bfloat16, target) is None


def test_wider_sizes_and_slower_cards_are_predicted_to_take_longer() -> None:
    op = linalg_dsl.compile(linalg_dsl.ops.gated_delta_rule.spec)

    def time(shape: Shape, target: str) -> float:
        found = predicted_times(op, shape, torch.bfloat16, TARGETS[target])
        assert found is not None
        return sum(found)

    assert time(Shape(8, 4096, 16, 128, 128), "sm_90") > 1.7 * time(SHAPES["train"], "sm_90")
    assert time(SHAPES["train"], "sm_80") > time(SHAPES["train"], "sm_90")


def test_a_check_finds_wrong_numbers_unwritten_memory_and_races(monkeypatch: pytest.MonkeyPatch) -> None:
    op = linalg_dsl.compile(linalg_dsl.ops.gla.spec)
    tensors = tuple(inputs_of(op.spec, SHAPE, torch.float32, CPU).values())
    found = verdict(op, tensors, torch.float32, runs=2)
    assert found.ok
    assert str(found).endswith("equal bits")
    calls = iter(range(100))

    class Spoiled:
        spec = op.spec

        def __init__(self, changing: bool) -> None:
            self.changing = changing

        def __call__(self, *given: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = op(*given)
            return out + (1e-7 * next(calls) if self.changing else 1e-2)

    for changing in (False, True):
        bad = verdict(Spoiled(changing), tensors, torch.float32, runs=3)  # type: ignore[arg-type]
        assert not bad.ok
        assert bad.same is not changing
    before = torch.are_deterministic_algorithms_enabled()
    with nan_filled():
        assert torch.empty(3).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() is before


def test_a_long_call_repeats_the_tokens_that_were_drawn() -> None:
    spec = linalg_dsl.ops.gla.spec
    made = inputs_of(spec, Shape(2, 2500, 1, 4, 4), torch.float32, CPU)
    for x in made.values():
        assert x.shape[:3] == (2, 2500, 1)
        assert torch.equal(x[0, :476], x[1, 1024:1500])
        assert not torch.equal(x[0, :1], x[0, 1:2])


def test_shapes_have_names_and_take_no_sizes_beside() -> None:
    status, printed = run("bench", "gla", "--device", "cpu", "--shape", "wide", "--json")
    assert status != 0
    done = CliRunner().invoke(app, ["bench", "gla", "--device", "cpu", "--shape", "long", "--K", "4"])
    assert "--K: a shape that is named has its sizes" in str(done.exception)
    assert printed == ""
    assert (SHAPES["few"].T, SHAPES["few"].H) == (131072, 4)


def test_rows_are_written_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    status, _ = run("bench", "gla", *SMALL, "--T", "8", "--check", "--out", str(path))
    assert status == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"card", "versions", "date"} <= data.keys()
    assert all(row["right"] for row in data["rows"])


def test_peers_on_record_stand_beside_shapes_that_they_were_measured_at() -> None:
    rows = recorded_rows(["delta_rule"], SHAPES["train"], ("forward",))
    assert {r["name"] for r in rows} == {"delta_rule", "attention"}
    assert all("NVIDIA H200" in r["operator"] for r in rows)
    assert recorded_rows(["delta_rule"], SHAPE, ("forward",)) == []


def script(name: str) -> Any:
    """A script of tests/gpu as a module."""
    return module_of_file(Path(__file__).parent / "gpu" / f"{name}.py")


def measured(operator: str, passes: str, ms: float, **more: object) -> dict[str, object]:
    row: dict[str, object] = {
        "operator": operator, "passes": passes, "B": 8, "T": 2048, "H": 16, "K": 128, "V": 128,
        "shape": "train", "backend": "triton", "ms": 2 * ms, "graph": ms, "predicted": 0.5 * ms,
        "flop_share": 0.1, "byte_share": 0.4, "launches": 2, "peak": 3_000_000,
        "verdict": "o 1e-3", "right": True,
    }  # fmt: skip
    return row | more


def test_the_page_says_where_we_lose() -> None:
    benchmarks = script("write_benchmarks").benchmarks
    ours = [
        measured("gla", "forward", 0.5),
        measured("delta_rule", "forward", 0.7, right=False, verdict="o 9e-2"),
        measured("delta_rule (two_level)", "forward", 0.8),
    ]
    peers = [
        measured("gla (fla)", "forward", 1.0, backend="fla"),
        measured("delta_rule (fla)", "forward", 0.6, backend="fla"),
        measured("attention (SDPA)", "forward", 0.3, backend="torch"),
    ]
    setting = {"card": "A card", "versions": "torch 1", "date": "2026-01-02"}
    data = {**setting, "flops_per_second": 7e14, "bytes_per_second": 4e12, "rows": [*ours, peers[0]]}
    text = benchmarks([data], {**setting, "card": "Another", "rows": peers[1:]})
    assert "A card, 2026-01-02. torch 1." in text
    assert "| gla | forward | 0.5 | 1.000 | 0.25 | 40% | 2 | 3 | 1.000 | 2.00 |" in text
    lost = text.partition("## Where we lose")[2].partition("##")[0]
    assert "delta_rule, train, forward: 0.7 against 0.6 of delta_rule (fla)" in lost
    assert "gla" not in lost
    assert "beyond a bound: delta_rule, train: o 9e-2" in text
    missing = text.partition("## Not measured in this run")[2].partition("##")[0]
    assert "- long: all operators" in missing
    assert "- train: linear_attention, retnet, simple_gla, gated_delta_rule" in missing
    with pytest.raises(SystemExit, match="several cards"):
        benchmarks([data, {**data, "card": "B"}], {**setting, "rows": []})


def test_the_model_is_fitted_to_what_was_measured() -> None:
    fitted, LAUNCH = script("fit_model").fitted, script("fit_model").LAUNCH
    rows = [
        {"features": [a, b, c, 0.0], "us": LAUNCH + 2 * a + 0.5 * c, "moved": 0.0}
        for a, b, c in ((1.0, 2.0, 3.0), (2.0, 1.0, 9.0), (4.0, 4.0, 1.0), (3.0, 7.0, 5.0))
    ]
    assert fitted(rows) == pytest.approx((2.0, 0.0, 0.5, 0.0), abs=1e-6)


def test_what_takes_long_is_said_beforehand() -> None:
    from linalg_dsl.cli_bench import SLOW, _least_seconds
    from linalg_dsl.ops.bench import Shape

    op = linalg_dsl.compile(linalg_dsl.ops.delta_rule.spec)
    small = _least_seconds(op, Shape(B=1, T=256, H=2, K=32, V=32), 1e10)
    assert 0 < small < SLOW < _least_seconds(op, Shape(B=8, T=2048, H=16, K=128, V=128), 1e10)
    assert _least_seconds(op, Shape(B=3, T=512, H=2, K=32, V=32), 1e10) == pytest.approx(6 * small)


def test_bits_are_compared_of_what_is_not_a_number_too() -> None:
    from linalg_dsl.ops.bench_check import _equal

    x = torch.tensor([1.0, float("nan")])
    assert _equal([x, None], [x.clone(), None])
    assert not _equal([x], [torch.tensor([1.0, float("inf")])])
    assert not _equal([torch.tensor([0.0])], [torch.tensor([-0.0])])
    assert not _equal([x], [None])
