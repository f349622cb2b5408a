"""Keeping track of a state: parity of bits, and products of permutations (S3).

    python examples/state_tracking.py                     # parity at toy size: minutes on a CPU
    python examples/state_tracking.py --task s3           # three things, exchanged two at a time
    python examples/state_tracking.py --size gpu --all --seeds 3 --device cuda --together

At every token the answer depends on all tokens so far, and no sum or average of them holds it: a memory has
to change its sign, or reflect, when a token says so. A delta rule with strengths in (0, 1) has eigenvalues
from 0 to 1 and cannot; with strengths in (0, 2) they go down to -1 and it can (Grazzi et al. 2024, arXiv
2411.12537). All models have one size and one training, at the shortest length; they are tested on that and
on longer ones. Results are kept as in ``recall.py``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import linalg_dsl as ld
from linalg_dsl.errors import ArgumentError
from linalg_dsl.plots import save, spread
from linalg_dsl.study.models import Size, build
from linalg_dsl.study.record import Record
from linalg_dsl.study.tasks import Parity, Permutations
from linalg_dsl.study.training import Recipe, accuracy, train_together

# the catalogue's delta rule has strengths in (0, 2)
POSITIVE = str(ld.ops.delta_rule.spec).replace("scalar in (0, 2)", "scalar in (0, 1)")
LAYERS = {"positive_delta": POSITIVE}
TOY = ("linear", "positive_delta", "delta")
MODELS = ("softmax", *TOY, "gated_delta", "delta_product", "mamba2_negative")
TASKS: dict[str, Any] = {"parity": Parity, "s3": Permutations}
SIZES = {
    "toy": (
        Size(hidden=32, heads=2, head_dim=8),
        Recipe(steps=600, batch=64, learning_rate=1e-2, stop_at=0.999),
        (32, 64, 128),
    ),
    "gpu": (
        Size(hidden=128, heads=4, head_dim=32),
        Recipe(steps=5000, batch=256, learning_rate=4e-3, warmup=100, stop_at=0.9999),
        (40, 64, 128, 256),
    ),
}


def main(argv: list[str] | None = None) -> Record:
    options = _options(argv)
    size, recipe, lengths = SIZES[options.size]
    names = options.models or (MODELS if options.all else TOY)
    size = replace(size, layers=options.layers or size.layers)
    # six states to keep apart instead of two take longer
    steps = options.steps or recipe.steps * (3 if options.task == "s3" else 1)
    recipe = replace(
        recipe, steps=steps, learning_rate=options.rate or recipe.learning_rate, seconds=options.seconds
    )
    make = TASKS[options.task]
    settings = {"task": options.task, "size": asdict(size), "recipe": asdict(recipe), "lengths": lengths}
    record = Record(options.out / f"{options.task}.json", settings)
    runs = [(n, s) for s in range(options.seeds) for n in names if not record.has(model=n, seed=s)]
    for group in [runs] if options.together and runs else [[run] for run in runs]:
        models = [build(n, size, make().vocab_size, s, options.device, LAYERS) for n, s in group]
        seeds = [seed for _, seed in group]
        outcomes = train_together(
            models, make(lengths[0]), recipe, seeds, _printer(group), 100, options.until
        )
        for (name, seed), model, outcome in zip(group, models, outcomes, strict=True):
            used = {"steps": outcome.steps, "seconds": outcome.seconds, "beside": len(group) - 1}
            found = {n: accuracy(model, make(n), 4, bfloat16=recipe.bfloat16) for n in lengths}
            record.add(
                *({"model": name, "seed": seed, "length": n, "accuracy": found[n], **used} for n in lengths)
            )
    print(f"\n{options.task}: accuracy over the length, trained at {lengths[0]}")
    for name in names:
        rows = record.where(model=name)
        cells = []
        for n in lengths:
            values = [r["accuracy"] for r in rows if r["length"] == n]
            if not values:  # another process is at it
                continue
            between = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
            cells.append(f"{n:>8d}: {sum(values) / len(values):.2f}{between}")
        print(f"{name:20s}" + "".join(cells))
    series = {n: [(r["length"], r["accuracy"]) for r in record.where(model=n)] for n in names}
    try:
        path = options.out / f"{options.task}.png"
        print(save(spread(series, "length", "accuracy", title=options.task, log_x=True), path))
    except ArgumentError as error:  # matplotlib is an extra
        print(error)
    return record


def _printer(group: list[tuple[str, int]]) -> Any:
    def progress(which: int, step: int, loss: float, right: float) -> None:
        name, seed = group[which]
        print(f"  {name} seed {seed} step {step}: loss {loss:.3f}, {right:.1%} right", flush=True)

    return progress


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--task", choices=list(TASKS), default="parity")
    parser.add_argument("--size", choices=list(SIZES), default="toy")
    parser.add_argument("--all", action="store_true", help=f"all of {', '.join(MODELS)}")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="these, or layer patterns")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float, help="the learning rate")
    parser.add_argument("--together", action="store_true", help="train all side by side")
    parser.add_argument("--seconds", type=float, help="the most that one training takes")
    parser.add_argument("--until", type=float, help="when trainings end, in seconds since 1970 (date +%%s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("build/state_tracking"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
