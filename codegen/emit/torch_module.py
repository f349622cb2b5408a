"""The forward and backward chunk plans as one plain PyTorch module."""

from __future__ import annotations

from collections.abc import Mapping

from linalg_dsl.codegen.emit.names import Names
from linalg_dsl.codegen.emit.signature import row_count, run_time_consts, tuple_text
from linalg_dsl.codegen.emit.torch_layout import PrintedFunction, TorchText
from linalg_dsl.codegen.emit.torch_printer import ChunkPrinter
from linalg_dsl.codegen.emit.torch_text import Text
from linalg_dsl.language.spec import Input, RecurrenceSpec
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan

CHUNK = 64
CHANNEL_CHUNK = 64
"""Tokens per chunk where the caller does not say; the second with a decay per channel."""


def emit_torch(
    canonical: CanonicalRecurrence,
    forward: ChunkPlan,
    backward: ChunkPlan,
    chunk_size: int | None = None,
    wide: bool = False,
) -> str:
    """The text of a module with ``forward`` and ``backward`` over whole sequences.

    ``wide``: the output has the type of the state, not that of an input. The text depends on nothing but
    the arguments and this package's version.
    """
    spec = canonical.spec
    ((state, _, _, after),) = forward.carries
    ((output, o_node),) = forward.outputs
    consts = run_time_consts(spec, forward, backward)
    fwd = _Function(spec, forward, consts, (("carry", state),), ("S",))
    o, s_next = fwd.printer.run([o_node, after])
    bwd = _Function(
        spec,
        backward,
        consts,
        (("carry", state), ("carry_reverse", state), ("cotangent", output)),
        ("S", "dS", f"d_{output}"),
    )
    ((_, _, _, before),) = [c for c in backward.carries if c[1] == "reverse"]
    gradients = dict(backward.outputs)
    texts = bwd.printer.run([before, *gradients.values()])
    d_state, parts = texts[0], dict(zip(gradients, texts[1:], strict=True))
    first = "torch.zeros_like(dS)" if d_state.scalar else d_state.code
    numbers = dict(canonical.consts)
    grads = [bwd.gradient(decl, parts, numbers) for decl in spec.inputs]
    token = next(i for i, decl in enumerate(spec.inputs) if decl.timed)
    return TorchText(
        spec,
        unit="chunk",
        way="the chunkwise form",
        note="Inside a chunk a token value is [B, H, C, D], a score [B, H, C, C] (row t, column s), a state "
        "[B, H, K, V].",
        chunk=chunk_size or default_chunk(canonical),
        consts=consts,
        numbers=numbers,
        wide=wide,
        inputs=tuple(fwd.inputs),
        gradients=[g != "None" for g in grads],
        used=fwd.printer.used | bwd.printer.used,
        forward=PrintedFunction(
            tuple(fwd.args),
            fwd.body(token),
            f"{o.code}, {s_next.code}",
            "The output rows of one chunk and the state after it.",
        ),
        backward=PrintedFunction(
            tuple(bwd.args),
            bwd.body(token),
            f"{first}, {tuple_text(grads)}",
            f"The gradient of the state before one chunk, and those of its {', '.join(fwd.inputs)}.",
        ),
    ).text()


class _Function:
    """Argument names and the printer of one chunk function."""

    def __init__(
        self,
        spec: RecurrenceSpec,
        plan: ChunkPlan,
        consts: tuple[str, ...],
        leading: tuple[tuple[str, str], ...],
        wanted: tuple[str, ...],
    ) -> None:
        self.names = names = Names(reserved=("C", "K", "V"))
        leaves = {key: names.unique(name) for key, name in zip(leading, wanted, strict=True)}
        first = [leaves[key] for key in leading]
        self.inputs = []
        for decl in spec.inputs:
            leaves["input" if decl.timed else "param", decl.name] = name = names.unique(decl.name)
            self.inputs.append(name)
        last = []
        for const in consts:
            leaves["const", const] = name = names.unique(const)
            last.append(name)
        self.args = [*first, *self.inputs, *last]
        self.printer = ChunkPrinter(plan, leaves, names, like="S")

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
            lines.append("K, V = S.shape[-2:]")
        return (*lines, *self.printer.lines)


def default_chunk(canonical: CanonicalRecurrence) -> int:
    """Tokens per chunk where the caller does not say."""
    return CHANNEL_CHUNK if canonical.recurrences[0].decay.kind == "channel" else CHUNK
