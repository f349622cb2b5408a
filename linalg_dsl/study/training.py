"""Training a model on a task: one loop for every comparison, so that all get the same treatment."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from linalg_dsl.nn.lm import IGNORED
from linalg_dsl.study.tasks import Task


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW, linear warm-up, cosine decay to a tenth, gradients clipped to norm 1."""

    steps: int = 1000
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 50
    seed: int = 0
    stop_at: float = 1.01
    """Training ends early once the accuracy between two reports is above this."""
    bfloat16: bool = False
    """Under autocast."""


@dataclass
class Outcome:
    """``accuracy`` on fresh data, ``curve`` of (step, loss, training accuracy), ``seconds`` of training."""

    accuracy: float
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0


Progress = Callable[[int, float, float], None]


def train(
    model: nn.Module, task: Task, recipe: Recipe, progress: Progress | None = None, every: int = 50
) -> Outcome:
    """Trains ``model`` in place (``model(ids, targets=...)`` with ``.logits`` and ``.loss``, as ``LM``).

    ``progress(step, loss, accuracy)`` is called after every ``every`` steps with means over them.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(recipe.seed)
    optimiser = torch.optim.AdamW(_groups(model, recipe), lr=recipe.learning_rate, betas=(0.9, 0.95))
    outcome = Outcome(0.0)
    begin = time.perf_counter()
    losses, right = torch.zeros((), device=device), torch.zeros((), device=device)
    model.train()
    for step in range(1, recipe.steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * rate_at(step, recipe)
        ids, targets = (x.to(device) for x in task.batch(recipe.batch, generator))
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.bfloat16):
            out = model(ids, targets=targets)
        optimiser.zero_grad(set_to_none=True)
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses, right = losses + out.loss.detach(), right + fraction_right(out.logits, targets)
        if step % every == 0 or step == recipe.steps:
            since = step % every or every
            point = (step, float(losses) / since, float(right) / since)
            outcome.curve.append(point)
            losses, right = torch.zeros_like(losses), torch.zeros_like(right)
            if progress is not None:
                progress(*point)
            if point[2] > recipe.stop_at:
                break
    outcome.steps = step if recipe.steps else 0
    outcome.seconds = time.perf_counter() - begin
    outcome.accuracy = accuracy(model, task, seed=recipe.seed + 1)
    return outcome


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, batches: int = 8, size: int = 64, seed: int = 1) -> float:
    """The part of all answers that the model gets right, on data of its own."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1))
    model.eval()
    found = []
    for _ in range(batches):
        ids, targets = (x.to(device) for x in task.batch(size, generator))
        found.append(float(fraction_right(model(ids).logits, targets)))
    return sum(found) / len(found)


def fraction_right(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the targets that count, those that the likeliest token hits."""
    asked = targets != IGNORED
    return (logits.detach().argmax(-1) == targets)[asked].float().mean()


def rate_at(step: int, recipe: Recipe) -> float:
    """The part of the learning rate at a step, counted from 1."""
    if step <= recipe.warmup:
        return step / max(recipe.warmup, 1)
    done = (step - recipe.warmup) / max(recipe.steps - recipe.warmup, 1)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def _groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    """Weight decay for matrices only: not for biases, norms, gates' rates, params of a recurrence."""
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    decayed = [p for p in model.parameters() if id(p) in matrices]
    others = [p for p in model.parameters() if id(p) not in matrices]
    return [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
