"""The forward and backward chunk plans as one plain PyTorch module."""

from __future__ import annotations

from collections.abc import Mapping

from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.signature import row_count, run_time_consts, tuple_text
from linalg_dsl.codegen.emit.torch_layout import PrintedFunction, TorchText
from linalg_dsl.codegen.emit.torch_printer import ChunkPrinter
from linalg_dsl.codegen.emit.torch_text import Text
from linalg_dsl.codegen.emit.trace import Trace
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan
from linalg_dsl.planner.precision import precision

CHUNK = 64
CHANNEL_CHUNK = 64
"""Tokens per chunk where the caller does not say; the second with a decay per channel."""


def emit_torch(
    canonical: CanonicalRecurrence,
    forward: ChunkPlan,
    backward: ChunkPlan,
    chunk_size: int | None = None,
    wide: bool = False,
    trace: Trace | None = None,
) -> str:
    """The text of a module with ``forward`` and ``backward`` over whole sequences.

    ``wide``: the output has the type of the state, not that of an input. ``trace`` takes up
    what the names in the functions stand for. The text depends on nothing but the arguments and this
    package's version.
    """
    spec = canonical.spec
    states = [name for name, _, _, _ in forward.carries]
    ((output, o_node),) = forward.outputs
    consts = run_time_consts(spec, forward, backward)
    carried = {("carry", n): "S" if len(states) == 1 else f"S_{n}" for n in states}
    digits = precision(canonical)
    wide_solve = digits.solve == "float64"
    fwd = _Function(spec, forward, consts, carried, wide_solve)
    o, *after = fwd.printer.run([o_node, *(after for _, _, _, after in forward.carries)])
    handed_back = {("carry_reverse", n): f"d{name}" for (_, n), name in carried.items()}
    leading = {**carried, **handed_back, ("cotangent", output): f"d_{output}"}
    bwd = _Function(spec, backward, consts, leading, wide_solve)
    before = {name: node for name, direction, _, node in backward.carries if direction == "reverse"}
    gradients = dict(backward.outputs)
    texts = bwd.printer.run([*(before[n] for n in states), *gradients.values()])
    parts = dict(zip(gradients, texts[len(states) :], strict=True))
    d_states = [
        f"torch.zeros_like({name})" if text.scalar else text.code
        for name, text in zip(bwd.args[len(states) :], texts[: len(states)], strict=False)
    ]
    numbers = dict(canonical.consts)
    grads = [bwd.gradient(decl, parts, numbers) for decl in spec.inputs]
    if trace is not None:
        trace |= {"forward_chunk": fwd.printer.values(), "backward_chunk": bwd.printer.values()}
    token = next(i for i, decl in enumerate(spec.inputs) if decl.timed)
    return TorchText(
        spec,
        unit="chunk",
        way="the chunkwise form",
        note="Inside a chunk a token value is [B, H, C, D], a score [B, H, C, C] (row t, column s), a state "
        "[B, H, K, V].",
        chunk=chunk_size or default_chunk(canonical),
        consts=consts,
        states=tuple(states),
        numbers=numbers,
        wide=wide,
        inputs=tuple(fwd.inputs),
        gradients=[g != "None" for g in grads],
        used=fwd.printer.used | bwd.printer.used,
        forward=PrintedFunction(
            tuple(fwd.args),
            fwd.body(token),
            f"{o.code}, {tuple_text(x.code for x in after)}",
            f"The output rows of one chunk and the {'state' if len(states) == 1 else 'states'} after it.",
        ),
        backward=PrintedFunction(
            tuple(bwd.args),
            bwd.body(token),
            f"{tuple_text(d_states)}, {tuple_text(grads)}",
            f"The gradient of the {'state' if len(states) == 1 else 'states'} before one chunk, and those of "
            "its inputs in their order.",
        ),
        shortest=(digits.axis, digits.shortest if chunk_size is None else ()),
    ).text()


class _Function:
    """Argument names and the printer of one chunk function."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        plan: ChunkPlan,
        consts: tuple[str, ...],
        leading: Mapping[tuple[str, str], str],
        wide_solve: bool,
    ) -> None:
        self.names = names = Names(reserved=("C", "K", "V"))
        leaves = {key: names.unique(name) for key, name in leading.items()}
        self.first, *_ = first = list(leaves.values())
        self.inputs = []
        for decl in spec.inputs:
            leaves["input" if decl.timed else "param", decl.name] = name = names.unique(decl.name)
            self.inputs.append(name)
        last = []
        for const in consts:
            leaves["const", const] = name = names.unique(const)
            last.append(name)
        self.args = [*first, *self.inputs, *last]
        self.printer = ChunkPrinter(plan, leaves, names, self.first, wide_solve)

    def gradient(self, decl: Input, parts: Mapping[str, Text], numbers: Mapping[str, float]) -> str:
        """One gradient of the input's shape: rows stacked, zero where unused; "None" where there is none."""
        whole = parts.get(f"d_{decl.name}")
        if whole is not None:
            return whole.code
        rows = [parts.get(f"d_{decl.name}[{j}]") for j in range(row_count(decl, numbers))]
        used = [row.code for row in rows if row is not None]
        if not used:
            return "None"
        zero = f"torch.zeros_like({used[0]})"
        stacked = ", ".join(zero if row is None else row.code for row in rows)
        name = self.names.unique(f"d_{decl.name}")
        self.printer.lines.append(f"{name} = torch.stack([{stacked}], {-len(decl.dims)})")
        return name

    def body(self, token: int) -> tuple[str, ...]:
        """The statements, after the sizes that they mention."""
        used = self.printer.sizes
        lines = [f"C = {self.inputs[token]}.shape[2]"] if "C" in used else []
        if used & {"K", "V"}:
            lines.append(f"K, V = {self.first}.shape[-2:]")
        return (*lines, *self.printer.lines)


def default_chunk(canonical: CanonicalRecurrence) -> int:
    """Tokens per chunk where the caller does not say."""
    return CHANNEL_CHUNK if canonical.recurrences[0].decay.kind == "channel" else CHUNK
