"""A search finds what is faster, never takes what is wrong, outlives what fails, and goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import linalg_dsl as ld
from linalg_dsl.codegen.launch_sizes import LaunchSizes, read_launches
from linalg_dsl.ops import tune_worker
from linalg_dsl.ops import tuned as tuned_module
from linalg_dsl.ops.bench import Shape
from linalg_dsl.ops.launched import Launched
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.ops.tune_hands import wrong_numbers
from linalg_dsl.ops.tune_record import Record, length_class
from linalg_dsl.ops.tune_space import Variant, as_option, batches, neighbours, rounds, variants
from linalg_dsl.ops.tune_worker import Job, known, tune_apart
from linalg_dsl.ops.tuned import applied, tune_op, variants_of

SHAPE = Shape(1, 20, 1, 16, 16)
CPU = torch.device("cpu")
WALK = "linear_attention.fwd_walk"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINALG_DSL_CACHE", str(tmp_path))


def quiet(text: str) -> None:
    pass


def linear() -> CompiledOp:
    return ld.compile(ld.ops.linear_attention.spec, backend="triton", chunk_size=16)


def of(op: CompiledOp, kernel: str) -> LaunchSizes:
    return dict(op.options.launch).get(kernel, LaunchSizes())


class FakeHands:
    """Two warps are best for the forward's walk, then four stages; all other sizes cost the same."""

    def __init__(self) -> None:
        self.compiled: list[Launched] = []
        self.rounds: list[dict[str, Any]] = []
        self.checked: list[LaunchSizes] = []

    def compile(self, module: ModuleType, launches: Sequence[Launched]) -> list[int | str]:
        self.compiled += launches
        return [0] * len(launches)

    def kernel_times(self, modules: Sequence[Any], run: Callable[[], object]) -> dict[str, float]:
        self.rounds.append({n: s for m in modules for n, s in m.SIZES.items()})
        return {n: self.time(n, s[1], s[2]) for n, s in self.rounds[-1].items()}

    def time(self, kernel: str, warps: int, stages: int) -> float:
        if not kernel.endswith("fwd_walk"):
            return 1.0
        return 0.5 if warps == 2 else 0.75 if stages == 4 else 1.0

    def whole_time(self, op: CompiledOp, run: Callable[[], object]) -> float:
        return 9.0 + self.time("fwd_walk", of(op, WALK).warps or 4, of(op, WALK).stages or 3)

    def fault(self, op: CompiledOp, run: Callable[[], object]) -> str:
        self.checked.append(of(op, WALK))
        return ""


def search(hands: Any, op: CompiledOp | None = None, budget: float = 1e9) -> Record:
    return tune_op(op or linear(), SHAPE, torch.float32, CPU, "training", budget, hands, quiet)


def test_the_fastest_sizes_win_once_they_are_checked() -> None:
    hands = FakeHands()
    record = search(hands)
    assert record.finished
    assert record.best is not None
    assert record.best["launch"]["linear_attention.fwd_walk"]["warps"] == 2
    assert (record.default_ms, record.best_ms) == (10.0, 9.5)
    assert [sizes.warps for sizes in hands.checked] == [2, 2]  # on one level and on two
    tuned = applied(linear(), record)
    assert of(tuned, WALK).warps == 2
    text = tuned.module_text("triton")
    assert "'linear_attention_fwd_walk': (16, 2, 3)" in text  # and so for every kernel, whatever the tables
    assert text.count("': (16, ") == sum(linear().plan.launches())


def test_what_wins_computes_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tuned = applied(linear(), search(FakeHands()))
    assert wrong_numbers(tuned, {"B": 1, "T": 20, "H": 1, "K": 16, "V": 16}, torch.float32, CPU) == ""


def test_sizes_are_put_back_after_the_search() -> None:
    op = linear()
    search(FakeHands(), op)
    assert op.operator("triton").module.SIZES == {}


def test_a_candidate_with_wrong_numbers_does_not_win() -> None:
    class Wrong(FakeHands):
        def fault(self, op: CompiledOp, run: Callable[[], object]) -> str:
            return "wrong numbers" if of(op, WALK) != LaunchSizes(16, 4, 3) else ""

    record = search(Wrong())
    assert record.best == {}
    assert record.finished
    assert any(found == "failed: wrong numbers" for found in record.tried.values())


def test_candidates_that_fail_or_spill_are_noted_and_left_out() -> None:
    class Failing(FakeHands):
        def compile(self, module: ModuleType, launches: Sequence[Launched]) -> list[int | str]:
            return ["OutOfResources" if x.stages == 4 else 300 if x.warps == 8 else 0 for x in launches]

        def kernel_times(self, modules: Sequence[Any], run: Callable[[], object]) -> dict[str, float]:
            times = super().kernel_times(modules, run)
            if any(sizes[1] == 2 for sizes in self.rounds[-1].values()):
                raise RuntimeError("misaligned address")
            return times

    record = search(Failing())
    assert record.finished
    assert record.best == {}
    found = {text for text in record.tried.values() if isinstance(text, str)}
    assert "failed: OutOfResources" in found
    assert "spills 300 registers" in found
    assert "failed: RuntimeError: misaligned address" in found


def test_a_search_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    first = FakeHands()
    ticks = iter(range(10_000))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    record = search(first, budget=4)
    assert not record.finished
    second = FakeHands()
    record = search(second)
    assert record.finished
    timed = [json.dumps(sizes) for sizes in first.rounds]
    assert timed
    assert not set(timed) & {json.dumps(sizes) for sizes in second.rounds}
    third = FakeHands()
    assert search(third).best == record.best
    assert not third.rounds


def test_what_ended_the_process_is_not_tried_again() -> None:
    class Dying(FakeHands):
        def kernel_times(self, modules: Sequence[Any], run: Callable[[], object]) -> dict[str, float]:
            if modules[0].SIZES["linear_attention_fwd_walk"][1] == 2:
                raise SystemExit(139)  # not an Exception: as if the process had gone
            return super().kernel_times(modules, run)

    starts: list[Job] = []

    def start(job: Job, say: Callable[[str], None]) -> tuple[int, str]:
        starts.append(job)
        try:
            search(Dying(), job.op)
        except SystemExit as gone:
            return int(str(gone.code)), "gone"
        return 0, ""

    op = linear()
    kinds = (torch.float32,) * 3
    job = Job(op, SHAPE, (1, 1, 1), kinds, "cpu", "training", 1e9)
    record = tune_apart(job, quiet, start)
    assert len(starts) >= 2
    assert record.finished
    assert record.best is not None
    assert record.best["launch"][WALK]["stages"] == 4  # the best of what can be run
    assert "failed: the process ended while it ran" in record.tried.values()
    assert known(job, op).best == record.best


def test_a_search_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_worker, "GRACE", 0.2)
    monkeypatch.setattr(tune_worker, "COMMAND", ("sleep", "60"))
    job = Job(linear(), SHAPE, (1, 1, 1), (torch.float32,) * 3, "cpu", "training", 0.1)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="tuning failed"):
        tune_apart(job, quiet)
    assert time.monotonic() - start < 50


def test_a_default_that_does_not_run_is_an_error() -> None:
    class Broken(FakeHands):
        def whole_time(self, op: CompiledOp, run: Callable[[], object]) -> float:
            raise RuntimeError("no kernel image")

    with pytest.raises(
        RuntimeError, match="the default choice does not run: failed: RuntimeError: no kernel"
    ):
        search(Broken())


def test_sizes_that_were_asked_for_stay() -> None:
    op = ld.compile(
        ld.ops.linear_attention.spec, backend="triton", chunk_size=16, launch={"fwd_walk": {"warps": 8}}
    )
    record = search(FakeHands(), op)
    assert not any("fwd_walk" in name for name in record.tried)
    assert of(applied(op, record), "fwd_walk").warps == 8


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("mamba1", {"mamba1.forward", "mamba1.backward"}),
        ("normalised_linear_attention", {"normalised_linear_attention_S.fwd_walk"}),
    ],
)
def test_step_kernels_and_stages_are_tuned_too(name: str, kernels: set[str]) -> None:
    class Narrow(FakeHands):
        def kernel_times(self, modules: Sequence[Any], run: Callable[[], object]) -> dict[str, float]:
            return {n: 9 / ((s[0] or 1) + s[1]) for m in modules for n, s in m.SIZES.items()}

        def whole_time(self, op: CompiledOp, run: Callable[[], object]) -> float:
            return 5.0 if op.options.launch else 9.0

    op = ld.compile(getattr(ld.ops, name).spec, backend="triton")
    record = search(Narrow(), op)
    assert record.best is not None
    assert kernels <= record.best["launch"].keys()
    assert applied(op, record).options.launch


def test_a_record_is_of_plan_shape_types_and_device() -> None:
    op, kinds = linear(), (torch.float32,) * 3
    job = Job(op, SHAPE, (1, 1, 1), kinds, "cpu", "training", 1.0)
    same = known(Job(op, Shape(1, 21, 1, 16, 16), (1, 1, 1), kinds, "cpu", "training", 9.0), op).name
    assert same == known(job, op).name
    others = [
        Job(op, Shape(1, 64, 1, 16, 16), (1, 1, 1), kinds, "cpu", "training", 1.0),
        Job(op, Shape(1, 20, 1, 16, 32), (1, 1, 1), kinds, "cpu", "training", 1.0),
        Job(op, SHAPE, (1, 1, 1), (torch.bfloat16,) * 3, "cpu", "training", 1.0),
        Job(op, SHAPE, (1, 1, 1), kinds, "cpu", "forward", 1.0),
    ]
    longer = op.with_options(chunk_size=32)
    names = {known(other, op).name for other in others} | {known(job, longer).name}
    assert len(names) == 5
    assert same not in names


def test_a_record_that_cannot_be_read_is_begun_anew(tmp_path: Path) -> None:
    record = search(FakeHands())
    (path,) = tmp_path.glob("tuned_*.json")
    path.write_text("{")
    assert search(FakeHands()).best == record.best


def test_the_neighbourhood() -> None:
    walk = Launched("w", 2, (), (("BLOCK", 64), ("BLOCKS", 2), ("STAGES", 3)), 4, 3)
    found = neighbours(walk)
    assert found[0] == (64, 4, 3)
    assert {(64, 8, 3), (64, 2, 3), (32, 4, 3), (128, 4, 3), (128, 8, 3), (64, 4, 4), (64, 4, 2)} <= set(
        found
    )
    whole = Launched("w", 2, (), (("BLOCK", 64), ("BLOCKS", 1), ("STAGES", 1)), 8, 1)
    assert all(block <= 64 and warps <= 8 and stages == 1 for block, warps, stages in neighbours(whole))
    prep = Launched("p", 2, (), (("KB", 32), ("K_BLOCKS", 4), ("VB", 32), ("V_BLOCKS", 4)), 2, 1)
    assert {(64, 2, 1), (16, 2, 1), (32, 4, 1), (32, 1, 1)} <= set(neighbours(prep))


def test_rounds_hold_every_choice() -> None:
    choices = {"a": [(16, 1, 1), (32, 1, 1)], "b": [(64, 4, 3)], "c": []}
    found = rounds({n: s for n, s in choices.items() if s})
    assert found == [{"a": (16, 1, 1), "b": (64, 4, 3)}, {"a": (32, 1, 1), "b": (64, 4, 3)}]


def test_batches_hold_every_choice_once_and_enough_to_compile_at_once() -> None:
    choices = {"a": [(16, w, 1) for w in range(1, 8)], "b": [(32, 1, 1)], "c": []}
    found = list(batches(choices, 6))
    assert [len(part["a"]) for part in found] == [2, 2, 2, 1]
    assert [s for part in found for s in part["a"]] == choices["a"]
    assert [s for part in found for s in part.get("b", [])] == choices["b"]
    assert list(batches({}, 4)) == []


def test_variants_keep_what_was_asked_for() -> None:
    assert variants(32, False, "walk", True, True) == (
        Variant(), Variant(chunk_size=64), Variant(chunk_size=16), Variant(schedule="two_level")
    )  # fmt: skip
    assert variants(32, True, "walk", False, True) == (Variant(),)
    assert variants(32, True, "walk", False, True, ("walk",)) == (Variant(), Variant(tma="walk"))
    assert variants(None, False, "walk", True, False) == (Variant(),)
    assert variants(None, False, "walk", True, False, (), ("a",)) == (Variant(), Variant(pointers="a"))


def test_descriptors_are_tried_where_the_device_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ld.compile(ld.ops.gated_delta_rule.spec, backend="triton", chunk_size=16)
    assert Variant(tma="walk") not in variants_of(op, SHAPE, CPU)
    module = op.operator("triton").module
    monkeypatch.setattr(module, "architecture", lambda device: 9)
    pays = ("fwd_walk", "bwd_forward_k", "bwd_reverse_k")
    first = [Variant(), Variant(tma="walk"), *(Variant(pointers=name) for name in pays)]
    assert list(variants_of(op, SHAPE, CPU)[:5]) == first
    assert first[2].launch == first[2].changes["launch"] == {"fwd_walk": {"tma": 0}}
    monkeypatch.setattr(module, "architecture", lambda device: 10)
    first = [Variant(), *(Variant(tma=name) for name in (*pays, "walk"))]
    assert list(variants_of(op, SHAPE, CPU)[:5]) == first
    asked = op.with_options(launch=read_launches({"walk": {"tma": 0}}))
    monkeypatch.setattr(asked.operator("triton").module, "architecture", lambda device: 9)
    assert not any(v.launch for v in variants_of(asked, SHAPE, CPU))
    assert str(Variant(tma="walk")) == "tma walk"


def test_walks_with_descriptors_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faster(FakeHands):
        def whole_time(self, op: CompiledOp, run: Callable[[], object]) -> float:
            return super().whole_time(op, run) - (2.0 if of(op, "walk").tma else 0.0)

    monkeypatch.setattr(tuned_module, "loads_of_walks", lambda op, stages, device: (("walk",), ()))
    record = search(Faster())
    assert record.best is not None
    assert record.best["launch"]["walk"] == {"tma": 1}
    assert record.best["launch"][WALK]["warps"] == 2
    best = applied(linear(), record)
    assert "DESCRIBED" in best.module_text("triton")
    assert "'linear_attention_fwd_walk': (16, 2, 3)" in best.module_text("triton")


def test_options_name_stage_and_kernel() -> None:
    owners = {"a_fwd_prep": ("a", "fwd_prep"), "a_fwd_walk": ("a", "fwd_walk")}
    found = as_option({"a_fwd_prep": (32, 2, 1), "a_fwd_walk": (64, 4, 3)}, owners)
    assert found == {
        "a.fwd_prep": {"block": 32, "warps": 2}, "a.fwd_walk": {"block": 64, "warps": 4, "stages": 3}
    }  # fmt: skip
    assert [length_class(n) for n in (1, 2047, 2048)] == [1, 1024, 2048]


def test_an_op_that_is_tuned_runs_as_it_is_where_there_is_no_gpu() -> None:
    op = ld.compile(ld.ops.linear_attention.spec, tune=True)
    x = torch.randn(1, 9, 1, 4)
    assert torch.equal(op(x, x, x), ld.ops.linear_attention(x, x, x))


def test_the_worker_takes_gpus_only() -> None:
    job = Job(linear(), SHAPE, (1, 1, 1), (torch.float32,) * 3, "cpu", "training", 1.0)
    with pytest.raises(
        RuntimeError, match=r"(?s)linear_attention: tuning failed: .*tuning needs a GPU, got cpu"
    ):
        tune_apart(job, quiet)  # in a process of its own
    with pytest.raises(ld.ArgumentError, match="tuning needs a GPU, got cpu"):
        tune_worker.main([job])
    assert [x.shape for x in job.tensors()] == [(1, 20, 1, 16)] * 3
