"""Exact proofs: they hold for what the planner makes, and fail for what is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from catalogue_sets import IN_DEPTH

from linalg_dsl.errors import InternalError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.planner.adjoint import backward
from linalg_dsl.planner.adjoint_rules import RULES
from linalg_dsl.planner.canonical import canonicalise
from linalg_dsl.planner.chunkwise import derive
from linalg_dsl.planner.form import CanonicalRecurrence
from linalg_dsl.planner.plan import ChunkPlan, Node, PlanBuilder
from linalg_dsl.planner.prove import prove

CATALOGUE = Path(__file__).parents[2] / "ops" / "catalogue"
LINES = {
    "multiplied_gate": """
        input q, k : [K]
        input v : [V]
        input w : log gate [K]
        input b : scalar in (0, 1)
        S_t = (I - b_t k_t k_tᵀ) diag(exp(b_t w_t)) S_{t-1} + k_t v_tᵀ
        o_t = S_tᵀ q_t
    """,
    "preludes": """
        input q, key : [K]
        input v, z : [V]
        input a, b : scalar
        k_t = l2norm(key_t)
        beta_t = sigmoid(b_t)
        S_t = sigmoid(a_t)^(1/16) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t softmax(v_t)ᵀ
        o_t = silu(z_t) ⊙ (S_tᵀ q_t) + tanh(z_t)
    """,
    "two_factors": """
        input q : [K]
        input k : [2, K] unit
        input v : [2, V]
        input beta : [2]
        input g : log gate
        S_t = exp(g_t) (I - beta_{t,2} k_{t,2} k_{t,2}ᵀ) (I - beta_{t,1} k_{t,1} k_{t,1}ᵀ) S_{t-1} + k_tᵀ v_t
        o_t = S_tᵀ q_t
    """,
    "decay_after_erase": """
        input q, k : [K]
        input v : [V]
        input a : log gate [K]
        input beta : scalar
        S_t = diag(exp(a_t)) (S_{t-1} - beta_t k_t (k_tᵀ S_{t-1})) + k_t v_tᵀ
        o_t = S_{t-1}ᵀ q_t
    """,
    "complement_gate": """
        input q, k : [K]
        input v : [V]
        input f : [K] in (0, 1)
        input a : scalar
        S_t = (1 - sigmoid(a_t)) diag(1 - f_t) S_{t-1} + max(k_t, f_t) v_tᵀ
        o_t = S_tᵀ relu(q_t) + abs(v_t) - elu(v_t)
    """,
}


def spec_of(name: str) -> RecurrenceSpec:
    if name in LINES:
        return parse(f"recurrence {name}\n" + "\n".join(line.strip() for line in LINES[name].splitlines()))
    return parse((CATALOGUE / f"{name}.rec").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [*IN_DEPTH, *LINES])
def test_chunk_form_is_the_recurrence_and_backward_its_gradient(name: str) -> None:
    canonical = canonicalise(spec_of(name))
    forward = derive(canonical)
    for tokens, K, V in ((3, 1, 1), (1, 2, 2) if name in LINES else (2, 2, 1)):
        proof = prove(canonical, tokens, K, V, forward, backward(forward))
        assert proof.holds, str(proof)
        assert proof.entries == K * V + tokens * V
        assert proof.gradients > proof.entries


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "dplr", "rwkv6", "delta_rule"])
def test_longer_and_wider_chunks(name: str) -> None:
    assert prove(spec_of(name), 4, 1, 1).holds
    assert prove(spec_of(name), 3, 2, 2).holds


def broken_nodes(plan: ChunkPlan) -> list[tuple[str, ChunkPlan]]:
    """The plan with one node changed, each way that keeps its axes and means something else."""
    # a solve uses pairs s < t only: there inclusive and decayed scores, and all masks, are the same
    strict: set[int] = set()
    for node in plan.nodes:
        if node.op == "solve":
            rank = int(str(node.attr("m"))) * int(str(node.attr("r")))
            strict |= {i for g in node.args[:rank] for i in (g, *plan.nodes[g].args)}

    def change(i: int, node: Node) -> ChunkPlan:
        return replace(plan, nodes=(*plan.nodes[:i], node, *plan.nodes[i + 1 :]))

    found = []
    for i, node in enumerate(plan.nodes):
        attrs = dict(node.attrs)
        if "read" in attrs:
            for read in {"inclusive", "exclusive", "decayed"} - {attrs["read"]}:
                if node.op == "mask" and ("decayed" in (read, attrs["read"]) or i in strict):
                    continue
                if i in strict and "exclusive" not in (read, attrs["read"]):
                    continue
                changed = tuple(sorted({**attrs, "read": read}.items()))
                found.append((f"{node.op} {i} reads {read}", change(i, replace(node, attrs=changed))))
        if "exclusive" in attrs:
            changed = tuple(sorted({**attrs, "exclusive": not attrs["exclusive"]}.items()))
            found.append((f"{node.op} {i} turned", change(i, replace(node, attrs=changed))))
        if node.op == "add":
            first = plan.nodes[node.args[0]]
            if first.axes == node.axes:
                found.append((f"add {i} doubled", change(i, replace(node, args=(node.args[0],) * 2))))
        if node.op == "number" and attrs["value"] == -1:
            found.append((f"number {i}", change(i, replace(node, attrs=(("value", 1.0),)))))
    return found


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "dplr", "rwkv6", "iplr"])
def test_every_change_of_a_plan_is_seen(name: str) -> None:
    canonical = canonicalise(spec_of(name))
    changes = broken_nodes(derive(canonical))
    assert len(changes) >= 3
    for what, plan in changes:
        proof = prove(canonical, 3, 1, 1, plan)
        assert not proof.holds, f"{what} is not seen"
        assert "not proved" in str(proof)


@pytest.mark.parametrize(
    ("name", "op", "operand"),
    [
        ("gated_delta_rule", "solve", 0), ("gated_delta_rule", "solve", 1), ("gated_delta_rule", "solve", 3),
        ("iplr", "solve", 4), ("iplr", "solve", 6), ("gated_delta_rule", "pairs_decay", 0),
        ("gated_delta_rule", "from_start", 0), ("gated_delta_rule", "to_end", 0),
        ("gated_delta_rule", "scale_state", 0), ("gated_delta_rule", "scale_state", 1),
        ("kda", "decayed_score", 0), ("kda", "decayed_score", 1), ("kda", "decayed_score", 2),
        ("kda", "read", 0), ("kda", "read", 1), ("kda", "write", 0), ("kda", "write", 1),
        ("delta_rule", "score", 0), ("delta_rule", "score", 1), ("delta_rule", "mask", 0),
        ("delta_rule", "apply", 0), ("delta_rule", "apply", 1), ("rwkv6", "sum", 0),
    ],
)  # fmt: skip
def test_a_missing_cotangent_is_seen(
    name: str, op: str, operand: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = RULES[op]

    def broken(b: PlanBuilder, node: int, cotangents: Sequence[int | None]) -> list[object]:
        parts: list[object] = list(sound(b, node, cotangents))
        parts[operand] = None
        return parts

    canonical = canonicalise(spec_of(name))
    forward = derive(canonical)
    monkeypatch.setattr("linalg_dsl.planner.adjoint.RULES", {**RULES, op: broken})
    assert not prove(canonical, 3, 1, 1, forward, backward(forward)).holds


def test_a_proof_prints_what_it_covers() -> None:
    canonical = canonicalise(spec_of("delta_rule"))
    forward = derive(canonical)
    assert str(prove(canonical, 2, 1, 1)) == (
        "chunk form = recurrence, identically in all inputs and the state at the start "
        "(chunk of 2, K = 1, V = 1; 3 entries)"
    )
    assert "backward plan = its gradient" in str(prove(canonical, 2, 1, 1, forward, backward(forward)))


def test_a_form_without_equations_cannot_be_proved() -> None:
    canonical = canonicalise(spec_of("delta_rule"))
    bare = CanonicalRecurrence(replace(canonical.spec, updates=()), canonical.recurrences)
    with pytest.raises(InternalError, match="no equations"):
        prove(bare)
