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
    seconds: float | None = None
    """Training ends after this time at the latest, counted from the first step's end (kernels compile in it);
    the rate decays towards whichever end comes first."""


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
    generator = torch.Generator(device).manual_seed(recipe.seed)
    update = _Update(model, recipe)
    outcome = Outcome(0.0)
    begin = started = time.perf_counter()
    losses, right = torch.zeros((), device=device), torch.zeros((), device=device)
    model.train()
    for step in range(1, recipe.steps + 1):
        spent = (time.perf_counter() - started) / recipe.seconds if recipe.seconds else 0.0
        rate = recipe.learning_rate * rate_at(step, recipe, spent)
        loss, hits = update(*task.batch(recipe.batch, generator), rate)
        if step == 1:
            started = time.perf_counter()
        losses, right = losses + loss, right + hits
        if step % every == 0 or step == recipe.steps or spent >= 1:
            since = step % every or every
            point = (step, float(losses) / since, float(right) / since)
            outcome.curve.append(point)
            losses, right = torch.zeros_like(losses), torch.zeros_like(right)
            if progress is not None:
                progress(*point)
            if point[2] > recipe.stop_at or spent >= 1:
                break
    outcome.steps = step if recipe.steps else 0
    outcome.seconds = time.perf_counter() - begin
    outcome.accuracy = accuracy(model, task, seed=recipe.seed + 1)
    return outcome


class _Update:
    """One step of the optimiser on a batch; gives the loss and the part of right answers.

    On a GPU the step is captured in a CUDA graph once it has run: small models are bound by launches.
    """

    _ORDINARY_STEPS = 3  # kernels compile and check themselves in them

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model = model
        self._recipe = recipe
        self._device = next(model.parameters()).device
        self._on_gpu = self._device.type == "cuda"
        self._rate = torch.tensor(recipe.learning_rate, device=self._device)
        self._optimiser = torch.optim.AdamW(
            _groups(model, recipe), lr=self._rate, betas=(0.9, 0.95), capturable=self._on_gpu
        )
        self._steps = 0
        self._given: tuple[Tensor, Tensor] | None = None
        self._found: tuple[Tensor, Tensor] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, ids: Tensor, targets: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        self._rate.fill_(rate)
        ids, targets = ids.to(self._device), targets.to(self._device)
        if not self._on_gpu:
            return self._run(ids, targets)
        if self._given is None:
            self._given = ids, targets
        if [x.shape for x in self._given] != [ids.shape, targets.shape]:
            return self._run(ids, targets)
        self._given[0].copy_(ids)
        self._given[1].copy_(targets)
        self._steps += 1
        if self._steps <= self._ORDINARY_STEPS:
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # as capture wants it
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found = self._run(*self._given)
            torch.cuda.current_stream().wait_stream(side)
            return found
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._found = self._run(*self._given)
        self._graph.replay()
        assert self._found is not None
        return self._found

    def _run(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # casts that autocast remembers would not belong to the graph
        cached = {"cache_enabled": False} if self._on_gpu else {}
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.bfloat16, **cached):
            out = self._model(ids, targets=targets)
        self._optimiser.zero_grad(set_to_none=True)
        out.loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimiser.step()
        return out.loss.detach(), fraction_right(out.logits, targets)


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, batches: int = 8, size: int = 64, seed: int = 1) -> float:
    """The part of all answers that the model gets right, on data of its own."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1_000_003 * (seed + 1))
    model.eval()
    found = []
    for _ in range(batches):
        ids, targets = task.batch(size, generator)
        found.append(float(fraction_right(model(ids).logits, targets)))
    return sum(found) / len(found)


def fraction_right(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the targets that count, those that the likeliest token hits."""
    asked = targets != IGNORED
    hits = (logits.detach().argmax(-1) == targets) & asked
    return hits.sum() / asked.sum()


def rate_at(step: int, recipe: Recipe, spent: float = 0.0) -> float:
    """The part of the learning rate at a step, counted from 1; ``spent``: the part of the time gone by."""
    if step <= recipe.warmup:
        return step / max(recipe.warmup, 1)
    done = min(1.0, max((step - recipe.warmup) / max(recipe.steps - recipe.warmup, 1), spent))
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def _groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    """Weight decay for matrices only: not for biases, norms, gates' rates, params of a recurrence."""
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    decayed = [p for p in model.parameters() if id(p) in matrices]
    others = [p for p in model.parameters() if id(p) not in matrices]
    return [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
