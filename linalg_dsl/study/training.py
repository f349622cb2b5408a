"""Training a model on a task: one loop for every comparison, so that all get the same treatment."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import cast

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
    """Training ends after this time at the latest, counted from when a batch of every shape has run (kernels
    compile then); the rate decays towards whichever end comes first."""


@dataclass
class Outcome:
    """``accuracy`` on fresh data, ``curve`` of (step, loss, training accuracy), ``seconds`` of training."""

    accuracy: float
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0


Progress = Callable[[int, float, float], None]
_AHEAD = 4
"""Steps that the host may be ahead of a GPU, so that a limit in seconds is kept."""


def train(
    model: nn.Module,
    task: Task | Sequence[Task],
    recipe: Recipe,
    progress: Progress | None = None,
    every: int = 50,
    until: float | None = None,
) -> Outcome:
    """Trains ``model`` in place (``model(ids, targets=..., at=...)`` with ``.logits``, ``.loss``, as ``LM``).

    Of several tasks every step takes the next; ``accuracy`` is that on the last one. ``progress(step, loss,
    accuracy)`` is called after every ``every`` steps with means over them. ``until``: the ``time.time()`` at
    which training ends at the latest, as ``recipe.seconds``.
    """

    def one(which: int, step: int, loss: float, right: float) -> None:
        if progress is not None:
            progress(step, loss, right)

    return train_together([model], task, recipe, [recipe.seed], one, every, until)[0]


def train_together(
    models: Sequence[nn.Module],
    task: Task | Sequence[Task],
    recipe: Recipe,
    seeds: Sequence[int],
    progress: Callable[[int, int, float, float], None] | None = None,
    every: int = 50,
    until: float | None = None,
) -> list[Outcome]:
    """Trains models side by side, in place, each as ``train`` does: one step of each, then the next.

    Models with the same seed (``seeds``, one for each; ``recipe.seed`` is not used) see the same batches. On
    a GPU every model has a stream of its own, so that small models fill it together. All end together but
    those that ``recipe.stop_at`` ends, so after ``seconds`` all have made the same number of steps; an
    outcome's ``seconds`` are those of all. ``progress(which, step, loss, accuracy)``. All models are on one
    device.
    """
    tasks = [task] if isinstance(task, Task) else list(task)
    device = next(models[0].parameters()).device
    places = [None if t.places is None else t.places.to(device) for t in tasks]
    # all shapes have run and, on a GPU, are captured
    settled = len(tasks) * (1 if device.type == "cpu" else 1 + _Update._ORDINARY_STEPS)
    generators = {seed: torch.Generator(device).manual_seed(seed) for seed in seeds}
    runs = [_Run(model, recipe, seed) for model, seed in zip(models, seeds, strict=True)]
    queue: deque[tuple[list[torch.cuda.Event], object]] = deque()
    begin = time.perf_counter()
    ends = math.inf if until is None else begin + until - time.time()
    started = begin
    for step in range(1, recipe.steps + 1):
        limit = min(ends, started + recipe.seconds) if recipe.seconds else ends
        spent = (time.perf_counter() - started) / max(limit - started, 1e-9)
        rate = recipe.learning_rate * rate_at(step, recipe, spent)
        turn = (step - 1) % len(tasks)
        active = [run for run in runs if not run.over]
        drawn = {s: tasks[turn].batch(recipe.batch, generators[s]) for s in {r.seed for r in active}}
        for run in active:
            run.step(*drawn[run.seed], places[turn], rate)
        if device.type == "cuda":
            queue.append(([run.event() for run in active], drawn))
            while len(queue) > (_AHEAD if step > settled else 0):
                for event in queue.popleft()[0]:
                    event.synchronize()
        if step == settled:
            started = time.perf_counter()
        last = step == recipe.steps or spent >= 1
        if step % every == 0 or last:
            for which, run in enumerate(runs):
                if not run.over:
                    point = run.report(step, last, recipe.stop_at)
                    if progress is not None:
                        progress(which, *point)
        if all(run.over for run in runs):
            break
    took = time.perf_counter() - begin
    for run in runs:
        run.outcome.seconds = took
        run.outcome.accuracy = accuracy(run.model, tasks[-1], seed=run.seed + 1, bfloat16=recipe.bfloat16)
    return [run.outcome for run in runs]


class _Run:
    """One model on its way: its step, its means since the last report, what came out."""

    def __init__(self, model: nn.Module, recipe: Recipe, seed: int) -> None:
        self.model, self.seed = model.train(), seed
        self.outcome = Outcome(0.0)
        self.over = recipe.steps == 0
        self._update = _Update(model, recipe)
        device = next(model.parameters()).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sums = torch.zeros(2, device=device)
        self._since = 0

    def step(self, ids: Tensor, targets: Tensor, places: Tensor | None, rate: float) -> None:
        """On the model's stream, after what is on the current one now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._here():
            self._sums += self._update(ids, targets, places, rate)
        self._since += 1
        self.outcome.steps += 1

    def event(self) -> torch.cuda.Event:
        """At the end of what the model's stream has to do so far."""
        assert self._stream is not None
        return cast(torch.cuda.Event, self._stream.record_event())

    def report(self, step: int, last: bool, stop_at: float) -> tuple[int, float, float]:
        """Means since the last report; afterwards the model may be through."""
        with self._here():
            loss, right = (self._sums / self._since).tolist()
            self._sums.zero_()
        self._since = 0
        self.outcome.curve.append((step, loss, right))
        self.over = last or right > stop_at
        if self.over and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return step, loss, right

    def _here(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


class _Update:
    """One step of the optimiser on a batch; gives the loss and the part of right answers, [2].

    On a GPU the step is captured in a CUDA graph for every shape of a batch once that has run: small models
    are bound by launches.
    """

    _ORDINARY_STEPS = 2  # kernels compile and check themselves in them

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model = model
        self._recipe = recipe
        self._device = next(model.parameters()).device
        self._on_gpu = self._device.type == "cuda"
        self._rate = torch.tensor(recipe.learning_rate, device=self._device)
        self._optimiser = torch.optim.AdamW(
            _groups(model, recipe), lr=self._rate, betas=(0.9, 0.95), capturable=self._on_gpu
        )
        self._steps: dict[tuple[int, ...], int] = {}
        self._captured: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, list[Tensor | None], Tensor]] = {}

    def __call__(self, ids: Tensor, targets: Tensor, places: Tensor | None, rate: float) -> Tensor:
        self._rate.fill_(rate)
        # on the model's device already, where tasks draw with a generator of that device
        given = [None if x is None else x.to(self._device) for x in (ids, targets, places)]
        if not self._on_gpu:
            return self._run(given)
        shape = tuple(ids.shape)
        if shape not in self._captured:
            self._steps[shape] = self._steps.get(shape, 0) + 1
            if self._steps[shape] <= self._ORDINARY_STEPS:
                return self._run(given)
            given = [None if x is None else x.clone() for x in given]
            # a model's graphs run one after the other and may share memory
            pool = next((g.pool() for g, _, _ in self._captured.values()), None)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, torch.cuda.current_stream(self._device)):
                found = self._run(given)
            self._captured[shape] = graph, given, found
        graph, held, found = self._captured[shape]
        for x, new in zip(held, (ids, targets, places), strict=True):
            if x is not None and new is not None:
                x.copy_(new)
        graph.replay()
        return found

    def _run(self, given: Sequence[Tensor | None]) -> Tensor:
        ids, targets, places = given
        assert ids is not None
        assert targets is not None
        # casts that autocast remembers would not belong to the graph
        cached = {"cache_enabled": False} if self._on_gpu else {}
        if places is not None:
            targets = targets.index_select(1, places)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._recipe.bfloat16, **cached):
            out = self._model(ids, targets=targets, at=places)
        self._optimiser.zero_grad(set_to_none=True)
        out.loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimiser.step()
        return torch.stack([out.loss.detach(), fraction_right(out.logits, targets)])


@torch.no_grad()
def accuracy(
    model: nn.Module,
    task: Task,
    batches: int = 8,
    size: int = 64,
    seed: int = 1,
    bfloat16: bool = False,
) -> float:
    """The part of all answers that the model gets right, on data of its own; ``bfloat16``: under autocast."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1_000_003 * (seed + 1))
    model.eval()
    found = []
    for _ in range(batches):
        ids, targets = task.batch(size, generator)
        at = None if task.places is None else task.places.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(ids, at=at).logits
        found.append(float(fraction_right(logits, targets if at is None else targets.index_select(1, at))))
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
