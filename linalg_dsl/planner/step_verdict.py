"""What became of a line without a chunk form: class, reason, the equations of a token, costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from linalg_dsl.language.latex import to_latex
from linalg_dsl.language.printer import show_expr
from linalg_dsl.planner.equations import Equation, Writer, equation_data, legend
from linalg_dsl.planner.plan import ChunkPlan, Node
from linalg_dsl.planner.step_cost import StepCost, step_cost
from linalg_dsl.planner.step_form import StepForm
from linalg_dsl.planner.verdict import DEFAULT_SIZE, equation_text, wrapped

_HOW = {
    "scan": "no sum feeds the states: fused kernel, token after token, every element of a state on its own",
    "sequential": "kernel that goes token after token",
}


@dataclass(frozen=True)
class StepExplanation:
    """Prints itself; ``calls`` are B, T, H and ``sizes`` K, V of a call, None where they are not given."""

    form: StepForm
    forward: ChunkPlan
    backward: ChunkPlan
    calls: tuple[int | None, ...]
    sizes: tuple[int | None, int | None]
    schedule: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The class and what it compiles to, in one line."""
        return f"{self.form.spec.name}: {self.form.name} → {_HOW[self.form.name]}"

    @property
    def line(self) -> tuple[str, ...]:
        """The equations as the user wrote them."""
        spec = self.form.spec
        written = spec.written or (*spec.updates, *spec.outputs)
        return tuple(f"{e.target}_t = {show_expr(e.value)}" for e in written)

    @property
    def forward_equations(self) -> tuple[Equation, ...]:
        return TokenWriter(self.forward, {}, {}).run()

    @property
    def backward_equations(self) -> tuple[Equation, ...]:
        from linalg_dsl.planner.cost import shared_nodes

        first = TokenWriter(self.forward, {}, {})
        first.run()
        return TokenWriter(self.backward, shared_nodes(self.backward, self.forward), first.names).run()

    @property
    def cost(self) -> StepCost:
        key, value = (size or DEFAULT_SIZE for size in self.sizes)
        return step_cost(self.form, self.forward, self.backward, key, value)

    @property
    def costs(self) -> tuple[str, ...]:
        return self.cost.lines(*self.calls)

    def __str__(self) -> str:
        made = [*self.forward_equations, *self.backward_equations]
        sections = [
            ("the line", self.line),
            ("no chunk form", self.form.reasons),
            ("one token", [equation_text(e) for e in self.forward_equations]),
            ("its gradients", [equation_text(e) for e in self.backward_equations]),
            ("where", legend(made, self.forward)),
            ("costs", self.costs),
            ("schedule", self.schedule),
        ]
        parts = [self.verdict]
        for title, lines in sections:
            if lines:
                parts.append("\n".join([title, *(wrapped(line) for line in lines)]))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """What is printed, as plain data, with the keys of a chunk form's explanation."""
        return {
            "name": self.form.spec.name,
            "class": self.form.name,
            "verdict": self.verdict,
            "line": list(self.line),
            "rewrites": [],
            "form": [],
            "forward": equation_data(self.forward_equations),
            "backward": equation_data(self.backward_equations),
            "order": [],
            "missed": list(self.form.reasons),
            "proof": [],
            "costs": list(self.costs),
            "stability": [],
            "precision": [],
            "schedule": list(self.schedule),
        }

    def to_latex(self) -> str:
        """The line and the equations of a token, one ``align*`` each."""
        line = [Equation(left, right) for left, _, right in (x.partition(" = ") for x in self.line)]
        parts = []
        for title, lines in (
            ("The line", line),
            ("One token", self.forward_equations),
            ("Its gradients", self.backward_equations),
        ):
            rows = " \\\\\n".join(f"  {to_latex(e.left)} &= {to_latex(e.right)}" for e in lines)
            parts.append(f"\\paragraph{{{title}.}}\n\\begin{{align*}}\n{rows}\n\\end{{align*}}")
        return "\n".join(parts) + "\n"


class TokenWriter(Writer):
    """Equations of one token: a state before it is S_{t-1}, after it S_t."""

    def _name(
        self, i: int, node: Node, outputs: dict[int, str], carried: dict[int, tuple[str, str]]
    ) -> str | None:
        if node.op == "carry":
            state = str(node.attr("name"))
            return f"{state}_{{t-1}}" if node.attr("direction") == "forward" else f"d{state}_t'"
        if node.op == "eye":
            return None
        if i in carried:
            state, direction = carried[i]
            return f"{state}_t" if direction == "forward" else f"d{state}_{{t-1}}"
        if node.label.startswith("d_") and node.label.endswith("_next"):
            return f"d{node.label[2:-5]}_t"
        return super()._name(i, node, outputs, carried)
