"""A language model over bytes, with nine kinds of layers, on a text that comes with Python.

    python examples/byte_lm.py                                 # tiny, one recurrence: a minute on a CPU
    python examples/byte_lm.py --size gpu --all --device cuda --together  # nine models, minutes on one GPU

The text ships with Python: at tiny size the language reference as its interactive help prints it
(`pydoc_data.topics` of the standard library, about half a megabyte), at gpu size the sources of the standard
library (its .py files without tests and installed packages, more than 10 MB). The last twentieth is held
out. Prints the loss in bits per byte; results and curves go into a JSON file, a second run goes on where the
first one stopped, several with other models may run at once, and with matplotlib the curves are drawn.
``--together`` trains all models side by side, on the same batches.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sysconfig
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from linalg_dsl.errors import ArgumentError
from linalg_dsl.nn.lm import LM
from linalg_dsl.plots import save, spread
from linalg_dsl.study.models import PATTERNS, Size, build
from linalg_dsl.study.record import Record
from linalg_dsl.study.training import Recipe, train_together

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
LEAST = 100_000
"""Bytes of a text."""
SIZES = {
    "tiny": (
        Size(hidden=64, heads=2, head_dim=16, layers=2, mlp_ratio=2.0, init_std=0.02),
        Recipe(steps=150, batch=8, learning_rate=3e-3, warmup=20),
        128,
    ),
    "gpu": (
        Size(hidden=384, heads=3, head_dim=128, layers=6, mlp_ratio=8 / 3, init_std=0.02),
        Recipe(steps=3000, batch=16, learning_rate=2e-3, warmup=100, bfloat16=True),
        1024,
    ),
}


@dataclass(frozen=True)
class Text:
    """Windows of ``length`` + 1 bytes at random places; the target of a byte is the next.

    ``data`` lies on the device of the generators that draw.
    """

    data: Tensor
    length: int
    name: str = "bytes"
    vocab_size: int = 256
    places: None = None

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        device = generator.device
        begin = torch.randint(len(self.data) - self.length, (size, 1), generator=generator, device=device)
        window = self.data[begin + torch.arange(self.length + 1, device=device)]
        return window[:, :-1], window[:, 1:]


def text(source: bool) -> tuple[Tensor, Tensor]:
    """What is trained on and what is held out, bytes as int64; ``source``: the library, not its help."""
    folder = Path(pydoc_data.topics.__file__)
    if source:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(p for p in folder.rglob("*.py") if not SKIPPED & set(p.relative_to(folder).parts))
        joined = b"\n".join(p.read_bytes() for p in files)
    else:
        topics = pydoc_data.topics.topics
        joined = "\n\n".join(topics[name] for name in sorted(topics)).encode("utf-8")
    if len(joined) < LEAST:
        raise ArgumentError(f"the text in {folder} has {len(joined)} bytes, at least {LEAST} are needed")
    data = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
    print(f"text: {len(joined):,} bytes of {folder.name}, from {folder}", flush=True)
    cut = len(data) * 19 // 20
    return data[:cut], data[cut:]


@torch.no_grad()
def bits_per_byte(model: LM, held_out: Tensor, length: int, bfloat16: bool) -> float:
    """The mean loss over the held-out text in windows of ``length``, in bits."""
    device = model.embed.weight.device
    count = (len(held_out) - 1) // length
    ids = held_out[: count * length].view(count, length)
    targets = held_out[1 : count * length + 1].view(count, length)
    losses = []
    for i in range(0, count, 16):
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            out = model(ids[i : i + 16].to(device), targets=targets[i : i + 16].to(device))
        losses.append((float(out.loss), len(ids[i : i + 16])))
    return sum(x * n for x, n in losses) / count / math.log(2)


def main(argv: list[str] | None = None) -> Record:
    options = _options(argv)
    size, recipe, length = SIZES[options.size]
    names = options.models or (list(PATTERNS) if options.all else ["gated_delta"])
    size = replace(size, layers=options.layers or size.layers)
    recipe = replace(
        recipe,
        steps=options.steps or recipe.steps,
        learning_rate=options.rate or recipe.learning_rate,
        seconds=options.seconds,
    )
    training, held_out = text(source=options.size == "gpu")
    if options.bytes:
        training, held_out = training[: options.bytes], held_out[: max(options.bytes // 19, 2 * length)]
    settings = {"size": asdict(size), "recipe": asdict(recipe), "length": length, "bytes": len(training)}
    record = Record(options.out / "byte_lm.json", settings)
    task = Text(training.to(options.device), length)
    missing = [n for n in names if not record.has(model=n)]
    for group in [missing] if options.together and missing else [[n] for n in missing]:
        _train(group, size, recipe, task, held_out, options, record)
    for row in sorted((r for n in names for r in record.where(model=n)), key=lambda r: r["bits_per_byte"]):
        print(f"{row['model']:20s} {row['bits_per_byte']:.3f} bits per byte, {row['seconds']:.0f} s")
    series = {n: [(s, b) for r in record.where(model=n) for s, b in r["curve"]] for n in names}
    try:
        print(save(spread(series, "step", "bits per byte"), options.out / "byte_lm.png"))
    except ArgumentError as error:  # matplotlib is an extra
        print(error)
    return record


def _train(
    group: list[str],
    size: Size,
    recipe: Recipe,
    task: Text,
    held_out: Tensor,
    options: argparse.Namespace,
    record: Record,
) -> None:
    """Trains the models of a group side by side and keeps their rows."""
    models = [build(name, size, 256, 0, options.device) for name in group]

    def progress(which: int, step: int, loss: float, right: float) -> None:
        print(f"  {group[which]} step {step}: {loss / math.log(2):.3f} bits per byte", flush=True)

    every = min(max(recipe.steps // 20, 1), 50)
    outcomes = train_together(models, task, recipe, [0] * len(group), progress, every, options.until)
    for name, model, outcome in zip(group, models, outcomes, strict=True):
        found = bits_per_byte(model, held_out, task.length, recipe.bfloat16)
        took = f"{outcome.steps} steps, {outcome.seconds:.0f} s"
        print(f"{name}: {found:.3f} bits per byte after {took}", flush=True)
        record.add(
            {
                "model": name,
                "bits_per_byte": found,
                "seconds": outcome.seconds,
                "steps": outcome.steps,
                "beside": len(group) - 1,
                "parameters": sum(p.numel() for p in model.parameters()),
                "curve": [(step, loss / math.log(2)) for step, loss, _ in outcome.curve],
            }
        )


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--all", action="store_true", help="all nine models")
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"of {', '.join(PATTERNS)}, or patterns")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rate", type=float, help="the learning rate")
    parser.add_argument("--together", action="store_true", help="train all side by side")
    parser.add_argument("--until", type=float, help="when trainings end, in seconds since 1970 (date +%%s)")
    parser.add_argument("--bytes", type=int, help="use only so much of the text")
    parser.add_argument("--seconds", type=float, help="the most that one training takes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("build/byte_lm"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
