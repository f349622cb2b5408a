"""What the tasks ask, and that training and its records do what they say."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

from linalg_dsl.errors import ArgumentError
from linalg_dsl.nn.lm import IGNORED
from linalg_dsl.study.models import HYBRIDS, PATTERNS, Size, build
from linalg_dsl.study.record import Record
from linalg_dsl.study.tasks import Parity, Permutations, Recall
from linalg_dsl.study.training import Recipe, accuracy, rate_at, train, train_together


@pytest.mark.parametrize(("tellings", "length"), [(1, None), (2, None), (3, 50)])
def test_recall_asks_for_the_value_told_last(tellings: int, length: int | None) -> None:
    task = Recall(pairs=5, tellings=tellings, symbols=24, length=length)
    ids, targets = task.batch(20, torch.Generator().manual_seed(0))
    assert ids.shape == targets.shape == (20, task.tokens)
    told = 5 * tellings
    for row, asked in zip(ids.tolist(), targets.tolist(), strict=True):
        memory: dict[int, int] = {}
        counts: dict[int, int] = {}
        for i in range(told):
            key, value = row[2 * i], row[2 * i + 1]
            assert 1 <= key < 12 <= value < 24
            memory[key] = value
            counts[key] = counts.get(key, 0) + 1
        assert set(counts.values()) == {tellings}
        assert asked[: 2 * told] == [IGNORED] * (2 * told)
        questions = {row[t]: y for t, y in enumerate(asked) if y != IGNORED}
        assert questions == memory
        rest = [row[t] for t in range(2 * told, len(row)) if asked[t] == IGNORED]
        assert set(rest) <= {0}


def test_training_ends_when_its_time_is_up() -> None:
    task = Recall(pairs=1, symbols=8)
    recipe = Recipe(steps=10**6, batch=2, seconds=0.2)
    outcome = train(build("linear", Size(hidden=8, head_dim=4), task.vocab_size, 0), task, recipe)
    assert 1 < outcome.steps < 10**6
    assert outcome.curve[-1][0] == outcome.steps
    # and the rate has decayed by then, however few the steps
    assert rate_at(100, recipe, 1.0) == pytest.approx(0.1)
    assert rate_at(100, recipe, 0.5) == pytest.approx(0.55)


def test_what_is_drawn_on_a_cpu_stays_what_it_was() -> None:
    # figures in docs/comparing.md are of these draws
    ids, targets = Recall(pairs=3, tellings=2, symbols=16).batch(2, torch.Generator().manual_seed(0))
    assert ids.tolist() == [
        [4, 13, 5, 9, 3, 13, 4, 8, 5, 9, 3, 12, 4, 0, 3, 0, 5, 0],
        [4, 11, 7, 8, 4, 11, 6, 13, 6, 14, 7, 15, 6, 0, 4, 0, 7, 0],
    ]
    assert targets[:, 12::2].tolist() == [[8, 12, 9], [14, 11, 15]]


def test_a_seed_gives_one_batch() -> None:
    first, second, third = (Recall().batch(4, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_states_are_tracked() -> None:
    bits, odd = Parity(9).batch(6, torch.Generator().manual_seed(0))
    assert torch.equal(odd[:, -1], bits.sum(-1) % 2)
    elements = list(permutations(range(3)))
    for swaps in (True, False):
        ids, products = Permutations(7, swaps).batch(9, torch.Generator().manual_seed(0))
        kinds = {sum(i != j for i, j in enumerate(elements[x])) for x in ids.flatten().tolist()}
        assert kinds == ({0, 2} if swaps else {0, 2, 3})
        for row, asked in zip(ids.tolist(), products.tolist(), strict=True):
            things = (0, 1, 2)
            for x, y in zip(row, asked, strict=True):
                things = tuple(elements[x][i] for i in things)  # moved after what stood before
                assert things == elements[y]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 4, "length": 10}, "length at least 16, got 10"),
        ({"pairs": 0}, "both must be at least 1"),
        ({"pairs": 9, "symbols": 16}, "needs 20 symbols, got 16"),
    ],
)
def test_tasks_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Recall(**options)


def test_training_learns_is_repeatable_and_stops_early() -> None:
    task, recipe = (
        Recall(pairs=1, symbols=8),
        Recipe(steps=60, batch=16, learning_rate=1e-2, warmup=5, stop_at=0.9),
    )
    outcomes = []
    for _ in range(2):
        model = build("delta", Size(hidden=16, head_dim=8), task.vocab_size, 0)
        before = accuracy(model, task)
        outcomes.append(train(model, task, recipe, every=20))
    first, second = outcomes
    assert before < 0.5 < first.accuracy
    assert [x[:3] for x in first.curve] == [x[:3] for x in second.curve]
    assert first.steps in (20, 40, 60)
    assert first.steps == 60 or first.curve[-1][2] > 0.9
    assert rate_at(1, recipe) == 0.2
    assert rate_at(5, recipe) == rate_at(6, recipe) / rate_at(6, recipe) == 1.0
    assert rate_at(60, recipe) == pytest.approx(0.1)


def test_all_models_have_one_size_of_state_and_nearly_of_parameters() -> None:
    size = Size(hidden=16, head_dim=4, layers=2)
    counts = {}
    for name in PATTERNS:
        model = build(name, size, 32, 0)
        counts[name] = sum(p.numel() for p in model.parameters())
        out = model(torch.randint(32, (2, 20)), use_cache=True)
        matrices = [x for s in out.past_key_values.layers if hasattr(s, "memory") for x in s.memory]
        assert all(x.shape == (2, 1, 4, 4) for x in matrices)
    assert max(counts.values()) < 1.5 * min(counts.values())
    assert len(build(HYBRIDS[0], Size(), 32, 0).layers) == 2
    assert len(build("delta", Size(), 32, 0).layers) == 1


def test_records_of_one_file_keep_all_rows(tmp_path: Path) -> None:
    first, second = (Record(tmp_path / "record.json", {"steps": 3}) for _ in range(2))
    first.add({"model": "a"})
    second.add({"model": "b"})
    first.add({"model": "c"})
    found = Record(tmp_path / "record.json", {"steps": 3})
    assert [r["model"] for r in found.rows] == ["a", "b", "c"]
    assert first.rows == found.rows


def test_models_trained_together_learn_what_they_learn_alone() -> None:
    tasks = [Recall(pairs=n, tellings=2, symbols=16) for n in (1, 2)]
    size = Size(hidden=16, head_dim=8)
    recipe = Recipe(steps=7, batch=8, warmup=2)
    names, seeds = ("delta", "softmax", "delta"), (0, 0, 1)

    def models() -> list[torch.nn.Module]:
        return [build(n, size, 16, s) for n, s in zip(names, seeds, strict=True)]

    seen: list[tuple[int, int]] = []
    together = train_together(
        models(), tasks, recipe, seeds, lambda which, step, loss, right: seen.append((which, step)), every=3
    )
    alone = [train(m, tasks, replace(recipe, seed=s), every=3) for m, s in zip(models(), seeds, strict=True)]
    assert seen == [(i, step) for step in (3, 6, 7) for i in range(3)]
    for one, other in zip(together, alone, strict=True):
        assert one.curve == other.curve
        assert (one.accuracy, one.steps) == (other.accuracy, 7)
    assert together[0].curve != together[2].curve
    stopped = train_together(models(), tasks, replace(recipe, stop_at=-1.0), seeds, every=2)
    assert [o.steps for o in stopped] == [2, 2, 2]
    over = train_together(models(), tasks, recipe, seeds, every=50, until=time.time() - 1)
    assert [o.steps for o in over] == [1, 1, 1]


def test_logits_at_some_places_are_those_of_all() -> None:
    task = Recall(pairs=3, tellings=2, symbols=16, length=24)
    model = build("delta", Size(hidden=16, head_dim=8), 16, 0)
    ids, targets = task.batch(4, torch.Generator().manual_seed(0))
    at = task.places
    assert bool((targets[:, [t for t in range(24) if t not in at.tolist()]] == -100).all())
    whole, some = model(ids, targets=targets), model(ids, targets=targets[:, at], at=at)
    torch.testing.assert_close(some.logits, whole.logits[:, at])
    torch.testing.assert_close(some.loss, whole.loss)
    with pytest.raises(ArgumentError, match=r"targets must be \[4, 6\]"):
        model(ids, targets=targets, at=at)


def test_a_record_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    record = Record(path, {"steps": 3, "sizes": (1, 2)})
    record.add({"model": "a", "score": 1.0}, {"model": "b", "score": 0.5, "note": "x"})
    again = Record(path, {"steps": 3, "sizes": [1, 2]}, strict=True)
    assert again.rows == record.rows
    assert again.has(model="b", score=0.5)
    assert not again.has(model="c")
    assert [p.name for p in path.parent.glob("[!.]*")] == ["record.json"]
    assert Record(path, {"steps": 4}).rows == []
    with pytest.raises(ArgumentError, match=r"other settings \(sizes, steps\)"):
        Record(path, {"steps": 4}, strict=True)
    lines = again.write_csv(tmp_path / "t.csv").read_text().splitlines()
    assert lines == ["model,score,note", "a,1.0,", "b,0.5,x"]
    path.write_text(json.dumps([1]))
    with pytest.raises(ArgumentError, match="no record of an earlier run"):
        Record(path, {})
