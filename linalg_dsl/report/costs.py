"""The section on costs: against chunk size and length, beside softmax attention."""

from __future__ import annotations

from linalg_dsl.planner.work import attention_work, crossover
from linalg_dsl.report.chart import chart
from linalg_dsl.report.launches import human
from linalg_dsl.report.markup import Markup, join, tag
from linalg_dsl.report.parts import Part
from linalg_dsl.report.text import item, row, table, three

LENGTHS = (512, 2048, 8192, 32768, 131072)


def costs(part: Part) -> Markup:
    call = part.call
    sizes = f"K = {call.K}, V = {call.V}"
    what = "; the coloured row is what runs" if part.schedules else ""
    return join(
        tag("p", f"Per token and head, {sizes}{what}.", class_="soft"),
        _by_chunk(part),
        tag(
            "p",
            "A sequence of one head, forward and backward, beside causal softmax attention, of which the "
            "products alone are counted.",
            class_="soft",
        ),
        tag("div", _by_length(part), _over_length(part), class_="beside"),
        tag("ul", *map(item, part.explanation.costs), class_="soft"),
    )


def _over_length(part: Part) -> Markup:
    """FLOPs per token over T: the recurrence's stay, attention's grow."""
    key, value = part.call.K, part.call.V
    own = part.work[part.chunk if part.schedules else 1]
    lengths = [2.0**i for i in range(6, 18)]
    attention = [(t, attention_work(int(t), key, value)) for t in lengths]
    lines = {
        "training": [(t, own.training_flops) for t in lengths],
        "forward": [(t, own.forward_flops) for t in lengths],
        "attention, training": [(t, w.training_flops) for t, w in attention],
        "attention, forward": [(t, w.forward_flops) for t, w in attention],
    }
    ahead, training = crossover(own, key, value)
    points = ((ahead, own.forward_flops), (training, own.training_flops))
    marks = [((t, y), f"T = {t:,.0f}") for t, y in points if lengths[0] < t < lengths[-1]]
    drawn = chart(lines, marks, "T", "FLOP per token and head")
    return tag("figure", tag("figcaption", "FLOP per token and head over T"), drawn)


def _by_chunk(part: Part) -> Markup:
    rows = []
    for chunk, work in part.work.items():
        lengths = (f"{max(t, 0):,.0f}" for t in crossover(work, part.call.K, part.call.V))
        cells = (
            str(chunk) if part.schedules else "one token",
            f"{three(work.forward_flops / 1000)}k",
            f"{three(work.backward_flops / 1000)}k",
            f"{work.forward_bytes:,.0f}",
            f"{work.backward_bytes:,.0f}",
            f"{work.forward_flops / work.forward_bytes:,.0f}",
            *lengths,
        )
        here = "here" if chunk == part.chunk and part.schedules else None
        rows.append(row(cells, range(8), here))
    head = (
        "chunk C", "forward FLOP", "backward FLOP", "forward bytes", "backward bytes", "FLOP per byte",
        "attention costs more from T = (forward)", "(training)",
    )  # fmt: skip
    return table(head, rows, range(8))


def _by_length(part: Part) -> Markup:
    own = part.work[part.chunk if part.schedules else 1]
    rows = []
    for length in LENGTHS:
        other = attention_work(length, part.call.K, part.call.V)
        cells = (
            f"{length:,}",
            three(own.training_flops * length / 1e9),
            three(other.training_flops * length / 1e9),
            f"{three(other.training_flops / own.training_flops)}×",
            human(own.state),
            human(other.state),
        )
        rows.append(row(cells, range(6)))
    head = ("T", "GFLOP", "attention GFLOP", "ratio", "state to decode", "attention's cache")
    return table(head, rows, range(6))
