"""The sections with drawings: equations as a graph, kernels and the tensors between them."""

from __future__ import annotations

from linalg_dsl.codegen.schedule.describe import KernelSchedule
from linalg_dsl.report.drawing import Drawing, draw
from linalg_dsl.report.flow import equation_flow, kernel_flow
from linalg_dsl.report.launches import PHASES, human
from linalg_dsl.report.markup import Markup, join, tag
from linalg_dsl.report.parts import Part
from linalg_dsl.report.text import item, prose, row, table

HUES = 8
_ROLES = (
    ("in", "given"),
    ("out", "result"),
    ("saved", "saved for the backward"),
    ("temporary", "between kernels"),
    ("state", "state of a sequence"),
)


def dataflow(part: Part, prefix: str) -> Markup:
    """A box per equation, in the colour of the kernel that computes it."""
    sizes = {"C": part.chunk, "K": part.call.K, "V": part.call.V}
    colours: dict[int, int] = {}
    keys = []
    for hue, launch in enumerate(x for x in part.launches if not x.ahead):
        keys.append(tag("li", tag("i", class_=f"swatch k{hue % HUES}"), launch.name))
        for e in sorted(launch.equations):
            if (e < part.origins.ahead) == (launch.phase == "forward"):
                colours.setdefault(e, hue % HUES)
    if part.schedules:
        keys.append(tag("li", tag("i", class_="swatch in"), "within others"))
    keys += [tag("li", "dashed: given"), tag("li", "dotted: computed by the forward's equations")]
    per = "chunk and head" if part.schedules else "token and head"
    figures = [
        _figure(
            f"{phase}: a box is a value, with its axes and its bytes in float32 per {per}",
            draw(equation_flow(part.origins, phase, sizes, colours, prefix), f"equations of the {phase}"),
        )
        for phase in PHASES
    ]
    return join(tag("ul", *keys, class_="legend"), tag("div", *figures, class_="sides"))


def kernels(part: Part, prefix: str) -> Markup:
    """The launches, drawn and as a table."""
    keys = [tag("li", tag("i", class_=f"swatch {kind}"), text) for kind, text in _ROLES]
    figures = [
        _figure(
            f"{phase}: kernels, and the tensors between them with shape and bytes",
            draw(kernel_flow(part.launches, phase, prefix), f"kernels of the {phase}"),
        )
        for phase in PHASES
    ]
    return join(
        tag("p", f"For a call with {part.call}.", class_="soft"),
        *(tag("p", prose(f"{line[:1].upper()}{line[1:]}."), class_="soft") for line in [part.levels] if line),
        tag("ul", *keys, class_="legend"),
        tag("div", *figures, class_="sides"),
        _on_chip(part, prefix) if part.schedules else tag("ul", *map(item, part.explanation.schedule)),
    )


def _figure(caption: str, drawing: Drawing) -> Markup:
    """As wide as its drawing where the page is, beside the next where both have room."""
    return tag(
        "figure",
        tag("figcaption", caption),
        tag("div", drawing.svg, class_="scroll"),
        style=f"flex-basis: {drawing.width}px",
    )


def _on_chip(part: Part, prefix: str) -> Markup:
    rows = []
    for launch, s in zip(part.launches, part.schedules, strict=True):
        moved: tuple[float, float]
        why: tuple[str, ...]
        if isinstance(s, KernelSchedule):
            stages, state, moved, why = str(s.stages), s.state, (s.read, s.written), s.reasons
        else:
            sizes = (sum(t.size for t in launch.reads), sum(t.size for t in launch.writes))
            stages, state, moved, why = "", 0, sizes, (s.purpose,)
        cells = (
            tag("a", s.name, href=f"#{prefix}-k-{s.name}"),
            launch.what,
            f"{s.programs:,}",
            str(s.block),
            str(s.warps),
            stages,
            human(state) if state else "",
            *map(human, moved),
            _microseconds(s.prediction.microseconds),
            tag("span", "; ".join(why), class_="note"),
        )
        rows.append(row(cells, range(2, 10)))
    head = (
        "kernel", "kind", "programs", "block", "warps", "stages", "state on chip", "reads", "writes",
        "μs (model)", "why",
    )  # fmt: skip
    return join(tag("h3", "Launches, and what stays on chip"), table(head, rows, range(2, 10)))


def _microseconds(time: float) -> str:
    return f"{time:,.0f}" if time >= 100 else f"{time:.3g}"
