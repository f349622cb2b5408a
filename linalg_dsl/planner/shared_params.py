"""Params whose gradients from several stages meet token by token.

Stages add up the gradient of a param over all tokens, and autograd adds what stages made. Where a running
maximum keeps exponentials in range (RWKV-4's), the output is the same whatever the maximum is, so that what
flows through it, and through the states scaled by it, cancels: per token in the recurrence, but of sums over
all tokens only to the digits of these sums. Such a param is laid out over the tokens once, before its stages.
"""

from __future__ import annotations

from dataclasses import replace

from linalg_dsl.algebra.expr import Call, Expr, Symbol
from linalg_dsl.algebra.traverse import mentions, transform, walk
from linalg_dsl.language.names import free_name
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.stages import PerToken, Stage, Stages, Step


def meeting_at_tokens(stages: Stages) -> Stages:
    """The stages with every param that a running maximum shares with another stage laid out over tokens."""
    params = [d.name for d in stages.spec.inputs if not d.timed]
    taken = {d.name for d in stages.spec.inputs} | {s.name for s in stages.spec.states}
    taken |= {name for s in stages.steps for name in s.made}
    for param in params:
        users = [s for s in stages.stages if param in s.arguments]
        if len(users) < 2 or not any(_keeps_a_maximum(s.spec) for s in users):
            continue
        name = free_name(f"{param}_each", taken)
        first: Step = PerToken(name, param)
        changed = [_timed(s, param, name) if isinstance(s, Stage) else s for s in stages.steps]
        stages = replace(stages, steps=(first, *changed))
    return stages


def _keeps_a_maximum(spec: RecurrenceSpec) -> bool:
    """Whether the larger (or smaller) of a state's past and something else is a state's update."""
    states = {s.name for s in spec.states}

    def chooses(node: Expr) -> bool:
        return (
            isinstance(node, Call)
            and node.function in ("max", "min")
            and any(mentions(a, lambda s: s.name in states and s.time == -1) for a in node.args)
        )

    return any(chooses(node) for e in spec.updates for node in walk(e.value))


def _timed(stage: Stage, param: str, name: str) -> Stage:
    """The stage with an input in place of the param, whose argument is ``name``."""
    if param not in stage.arguments:
        return stage
    own = stage.spec.inputs[stage.arguments.index(param)].name

    def change(node: Expr) -> Expr:
        if isinstance(node, Symbol) and node.name == own and node.time is None:
            return replace(node, time=0)
        return node

    spec = replace(
        stage.spec,
        inputs=tuple(replace(d, timed=True) if d.name == own else d for d in stage.spec.inputs),
        updates=tuple(replace(e, value=transform(e.value, change)) for e in stage.spec.updates),
        outputs=tuple(replace(e, value=transform(e.value, change)) for e in stage.spec.outputs),
    )
    arguments = tuple(name if a == param else a for a in stage.arguments)
    return replace(stage, spec=spec, arguments=arguments)
