"""Recall from a memory: which operators find the value that was told last under a key?

    python examples/recall.py                                # softmax, linear, delta: minutes on a CPU
    python examples/recall.py --all --seeds 3                # nine models with their spread
    python examples/recall.py --size gpu --all --seeds 3 --device cuda --together # a usual size, for one GPU
    python examples/recall.py --tellings 1                   # every key is told once, as published

Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927). Pairs of key and value go by, then
every key is asked for. Here every key is told twice with different values, and the later one counts: a memory
that only adds keeps both. All models get the same data, sizes, state size, short convolution and training;
hybrids have two layers at least, one of each kind. Each is trained on the largest number of pairs and tested
on that and on smaller numbers. Results go into a JSON file as soon as they are there, and a second run goes
on where the first one stopped; with matplotlib a plot is drawn.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from linalg_dsl.errors import ArgumentError
from linalg_dsl.plots import save, spread
from linalg_dsl.study.models import PATTERNS, Size, build
from linalg_dsl.study.record import Record
from linalg_dsl.study.tasks import Recall
from linalg_dsl.study.training import Outcome, Recipe, accuracy, train_together

TOY = ("softmax", "linear", "delta")
SIZES: dict[str, tuple[Size, Recall, Recipe, tuple[int, ...], bool]] = {
    "toy": (
        Size(),
        Recall(pairs=8, tellings=2, symbols=128),
        Recipe(steps=900, batch=64, learning_rate=5e-3, stop_at=0.995),
        (2, 4, 6, 8),
        False,
    ),
    "gpu": (
        Size(hidden=128, heads=2, head_dim=64),
        Recall(pairs=64, tellings=2, symbols=8192),
        Recipe(steps=8000, batch=96, learning_rate=4e-3, warmup=200, stop_at=0.999, bfloat16=True),
        (4, 8, 16, 32, 64),
        True,
    ),
}
"""Model, task, training, numbers of pairs to test, and whether all these are trained on."""


def main(argv: list[str] | None = None) -> Record:
    options = _options(argv)
    size, task, recipe, counts, mixed = SIZES[options.size]
    names = options.models or (list(PATTERNS) if options.all else list(TOY))
    size = replace(size, layers=options.layers or size.layers)
    counts = tuple(options.pairs or counts)
    task = replace(task, tellings=options.tellings or task.tellings, pairs=max(counts))
    recipe = replace(
        recipe,
        steps=options.steps or recipe.steps,
        learning_rate=options.rate or recipe.learning_rate,
        seconds=options.seconds,
    )
    settings = {
        "size": asdict(size), "task": asdict(task), "recipe": asdict(recipe), "counts": list(counts),
        "mixed": mixed,
    }  # fmt: skip
    record = Record(options.out / "recall.json", settings)
    tasks = [replace(task, pairs=n) for n in counts]
    trained = tasks if mixed else [task]
    runs = [(n, s) for s in range(options.seeds) for n in names if not record.has(model=n, seed=s)]
    for group in [runs] if options.together and runs else [[run] for run in runs]:
        _train(group, size, trained, tasks, recipe, options, record)
    _report(record, names, options.out)
    return record


def _train(
    group: list[tuple[str, int]],
    size: Size,
    trained: list[Recall],
    tested: list[Recall],
    recipe: Recipe,
    options: argparse.Namespace,
    record: Record,
) -> None:
    """Trains the (name, seed) of a group side by side and keeps their rows."""
    models = [build(name, size, trained[-1].vocab_size, seed, options.device) for name, seed in group]
    begin = time.process_time()

    def progress(which: int, step: int, loss: float, right: float) -> None:
        name, seed = group[which]
        print(f"  {name} seed {seed} step {step}: loss {loss:.3f}, {right:.1%} right", flush=True)

    every = min(max(recipe.steps // 9, 1), 250)
    seeds = [seed for _, seed in group]
    outcomes = train_together(models, trained, recipe, seeds, progress, every, options.until)
    spent = (time.process_time() - begin) / len(group)
    for (name, seed), model, outcome in zip(group, models, outcomes, strict=True):
        used = {"steps": outcome.steps, "seconds": outcome.seconds, "cpu_seconds": spent}
        used["beside"] = len(group) - 1
        rows = []
        for t in tested:
            right = accuracy(model, t, seed=seed + 1, bfloat16=recipe.bfloat16)
            rows.append({"model": name, "seed": seed, "pairs": t.pairs, "accuracy": right, **used})
        record.add(*rows)
        last = rows[-1]
        print(
            f"{name} seed {seed}: {last['accuracy']:.1%} of {last['pairs']} pairs after {_how_long(outcome)}",
            flush=True,
        )


def _how_long(outcome: Outcome) -> str:
    return f"{outcome.steps} steps, {outcome.seconds:.0f} s"


def _report(record: Record, names: list[str], out: Path) -> None:
    counts, told = record.settings["counts"], record.settings["task"]["tellings"]
    print(f"\naccuracy over the number of pairs, each told {told} time{'s' * (told > 1)}")
    print(f"{'':20s}" + "".join(f"{c:>18d}" for c in counts))
    for name in names:
        cells = []
        for count in counts:
            values = [r["accuracy"] for r in record.where(model=name, pairs=count)]
            if not values:  # another process is at it
                cells.append("-")
                continue
            between = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
            cells.append(f"{sum(values) / len(values):.2f}{between}")
        print(f"{name:20s}" + "".join(f"{c:>18s}" for c in cells))
    series = {n: [(r["pairs"], r["accuracy"]) for r in record.where(model=n)] for n in names}
    title = f"recall, every key told {told} time{'s' * (told > 1)}"
    try:
        print(save(spread(series, "pairs", "accuracy", title=title, log_x=True), out / "recall.png"))
    except ArgumentError as error:  # matplotlib is an extra
        print(error)


def _options(argv: list[str] | None) -> argparse.Namespace:
    known = ", ".join(PATTERNS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", choices=list(SIZES), default="toy")
    parser.add_argument("--all", action="store_true", help="all nine models")
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"of {known}, or layer patterns")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--pairs", type=int, nargs="+", help="numbers to test; the largest is trained on")
    parser.add_argument("--tellings", type=int, help="how often each key is told")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float, help="the learning rate")
    parser.add_argument("--together", action="store_true", help="train all side by side")
    parser.add_argument("--seconds", type=float, help="the most that one training takes")
    parser.add_argument("--until", type=float, help="when trainings end, in seconds since 1970 (date +%%s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("build/recall"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
