"""Recall from a memory: which operators find the value that was told last under a key?

    python examples/recall.py                                # softmax, linear, delta: minutes on a CPU
    python examples/recall.py --all --seeds 3                # nine models with their spread
    python examples/recall.py --size gpu --all --device cuda # a usual size, for one GPU
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
from typing import Any

import torch

from linalg_dsl.errors import ArgumentError
from linalg_dsl.plots import save, spread
from linalg_dsl.study.models import PATTERNS, Size, build
from linalg_dsl.study.record import Record
from linalg_dsl.study.tasks import Recall
from linalg_dsl.study.training import Recipe, accuracy, train

TOY = ("softmax", "linear", "delta")
SIZES: dict[str, tuple[Size, Recall, Recipe, tuple[int, ...]]] = {
    "toy": (
        Size(),
        Recall(pairs=8, tellings=2, symbols=128),
        Recipe(steps=900, batch=64, learning_rate=5e-3, stop_at=0.995),
        (2, 4, 6, 8),
    ),
    "gpu": (
        Size(hidden=256, heads=2, head_dim=64, layers=2, init_std=0.02),
        Recall(pairs=64, tellings=2, symbols=8192),
        Recipe(steps=20000, batch=128, learning_rate=1e-3, warmup=500, stop_at=0.999),
        (4, 8, 16, 32, 64),
    ),
}


def main(argv: list[str] | None = None) -> Record:
    options = _options(argv)
    size, task, recipe, counts = SIZES[options.size]
    names = options.models or (list(PATTERNS) if options.all else list(TOY))
    size = replace(size, layers=options.layers or size.layers)
    counts = tuple(options.pairs or counts)
    task = replace(task, tellings=options.tellings or task.tellings, pairs=max(counts))
    recipe = replace(recipe, steps=options.steps or recipe.steps, seconds=options.seconds)
    settings = {"size": asdict(size), "task": asdict(task), "recipe": asdict(recipe), "counts": list(counts)}
    record = Record(options.out / "recall.json", settings)
    for seed in range(options.seeds):
        for name in names:
            if not record.has(model=name, seed=seed):
                record.add(*_one(name, seed, size, task, recipe, counts, options.device))
    _report(record, names, options.out)
    return record


def _one(
    name: str, seed: int, size: Size, task: Recall, recipe: Recipe, counts: tuple[int, ...], device: str
) -> list[dict[str, Any]]:
    model = build(name, size, task.vocab_size, seed, device)
    begin = time.process_time()

    def progress(step: int, loss: float, right: float) -> None:
        print(f"  {name} seed {seed} step {step}: loss {loss:.3f}, {right:.1%} right", flush=True)

    outcome = train(model, task, replace(recipe, seed=seed), progress, every=max(recipe.steps // 9, 1))
    used = {"steps": outcome.steps, "seconds": outcome.seconds, "cpu_seconds": time.process_time() - begin}
    rows: list[dict[str, Any]] = []
    for count in counts:
        right = accuracy(model, replace(task, pairs=count), seed=seed + 1)
        rows.append({"model": name, "seed": seed, "pairs": count, "accuracy": right, **used})
    print(f"{name} seed {seed}: {right:.1%} of {counts[-1]} pairs in {outcome.seconds:.0f} s", flush=True)
    return rows


def _report(record: Record, names: list[str], out: Path) -> None:
    counts, told = record.settings["counts"], record.settings["task"]["tellings"]
    print(f"\naccuracy over the number of pairs, each told {told} time{'s' * (told > 1)}")
    print(f"{'':20s}" + "".join(f"{c:>18d}" for c in counts))
    for name in names:
        cells = []
        for count in counts:
            values = [r["accuracy"] for r in record.where(model=name, pairs=count)]
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
    parser.add_argument("--seconds", type=float, help="the most that one training takes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("build/recall"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
