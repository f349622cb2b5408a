"""A wrong and a right example for every code of a mistake.

What an example leaves out stands in ``HEAD``, ``UPDATE`` and ``READ``: its lines are those that matter.
``plan`` examples are read without complaint; the planner says their code. Where it only means that there is
no chunk form (``planner.classes.NO_CHUNK_FORM``), such a recurrence runs token after token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

HEAD = """recurrence example
input q, k : [K]
input v : [V]
input g : log gate
input beta : scalar in (0, 1)
"""
UPDATE = "S_t = S_{t-1} + k_t v_tᵀ"
READ = "o_t = S_tᵀ q_t"
_DECLARATIONS = ("input ", "const ", "param ", "state ", "output ")


class Example(NamedTuple):
    """Whole texts, or the source of whole functions for ``python``."""

    wrong: str
    right: str
    kind: Literal["text", "python", "plan"] = "text"


def whole(lines: str) -> str:
    """A recurrence around some lines of it: what they do not say is added."""
    if lines.startswith("recurrence"):
        return lines
    pieces = lines.split("\n")
    declared = [x for x in pieces if x.startswith(_DECLARATIONS)]
    equations = [x for x in pieces if x not in declared]
    if not any(x.lstrip().startswith(("S_t", "S_{", "S ")) for x in equations):
        equations.insert(0, UPDATE)
    if not any(x.startswith(("o_t", "y_t")) for x in equations):
        equations.append(READ)
    return HEAD + "\n".join((*declared, *equations)) + "\n"


def function(body: str, parameters: str = "S, q: ld.K, k: ld.K, v: ld.V") -> str:
    """A Python recurrence with this body."""
    lines = "\n".join(f"    {line}" for line in body.split("\n"))
    return f"@ld.recurrence\ndef example({parameters}):\n{lines}\n"


def _texts(wrong: str, right: str) -> Example:
    return Example(whole(wrong), whole(right))


def _plans(wrong: str, right: str) -> Example:
    return Example(whole(wrong), whole(right), "plan")


_PYTHON = "S = S + ld.outer(k, v)\nreturn S, S.T @ q"
_NO_OUTPUT = f"{HEAD}{UPDATE}\n"

EXAMPLES: dict[str, Example] = {
    "E101": _texts("S_t := S_{t-1} + k_t v_tᵀ", UPDATE),
    "E102": _texts(
        "S_t = exp(g_t (I - k_t k_tᵀ) S_{t-1}", "S_t = exp(g_t) (I - k_t k_tᵀ) S_{t-1} + k_t v_tᵀ"
    ),
    "E103": _texts("S_t = S_{t-1} + k_{j} v_tᵀ", UPDATE),
    "E104": _texts(f"input {'w' * 70} : [K]", "input w : [K]"),
    "E105": _texts("S_t = 1e99 S_{t-1} + k_t v_tᵀ", "S_t = 0.99 S_{t-1} + k_t v_tᵀ"),
    "E106": _texts("S_t = beta_t^2^3 S_{t-1} + k_t v_tᵀ", "S_t = (beta_t^2)^3 S_{t-1} + k_t v_tᵀ"),
    "E107": _texts(f"x_t = {'(' * 60}g_t{')' * 60}", "x_t = ((g_t))"),
    "E108": _texts("input w : vector", "input w : [K]"),
    "E201": _texts("S_t = sigmiod(g_t) S_{t-1} + k_t v_tᵀ", "S_t = sigmoid(g_t) S_{t-1} + k_t v_tᵀ"),
    "E202": _texts("S_t = S_{t-1} + k v_tᵀ", UPDATE),
    "E203": _texts("const c = 2\no_t = c_t S_tᵀ q_t", "const c = 2\no_t = c S_tᵀ q_t"),
    "E204": _texts("input exp : scalar", "input expected : scalar"),
    "E205": _texts("input q : [K]", "input q2 : [K]"),
    "E206": _texts("input α, alpha : scalar", "input α, alpha2 : scalar"),
    "E207": _texts("input w_t : [K]", "input w : [K]"),
    "E208": _texts("input w : [D]", "const D = 4\ninput w : [D]"),
    "E209": _texts("S_t = S_{t-1} + beta_tk_t v_tᵀ", "S_t = S_{t-1} + beta_t k_t v_tᵀ"),
    "E301": _texts("S_t = S_{t-1} + v_t k_tᵀ", UPDATE),
    "E302": _texts("S_t = S_{t-1} + k_t v_t", UPDATE),
    "E303": _texts("S_t = S_{t-1} + k_t * v_tᵀ", "S_t = S_{t-1} + k_t @ v_tᵀ"),
    "E304": _texts("S_t = k_t ⊙ S_{t-1} + k_t v_tᵀ", "S_t = diag(k_t) S_{t-1} + k_t v_tᵀ"),
    "E305": _texts("S_t = sum(g_t) S_{t-1} + k_t v_tᵀ", "S_t = sum(k_t) S_{t-1} + k_t v_tᵀ"),
    "E306": _texts("S_t = S_{t-1} + (k_t / v_t) v_tᵀ", "S_t = S_{t-1} + (k_t / sum(v_t)) v_tᵀ"),
    "E307": _texts(
        "input w : [2, K]\nS_t = S_{t-1} + w_{t,3} v_tᵀ", "input w : [2, K]\nS_t = S_{t-1} + w_{t,2} v_tᵀ"
    ),
    "E308": _texts("o_t = q_tᵀ S_t", READ),
    "E309": _texts("S_t = exp(I) S_{t-1} + k_t v_tᵀ", "S_t = exp(1) I S_{t-1} + k_t v_tᵀ"),
    "E401": _texts("S_t = S_t + k_t v_tᵀ", UPDATE),
    "E402": _texts(
        "S_t = S_{t-1} + w_t v_tᵀ\nw_t = beta_t k_t\no_t = S_tᵀ q_t",
        "w_t = beta_t k_t\nS_t = S_{t-1} + w_t v_tᵀ\no_t = S_tᵀ q_t",
    ),
    "E403": Example(_NO_OUTPUT, f"{_NO_OUTPUT}{READ}\n"),
    "E404": Example(f"{HEAD}o_t = v_t\n", whole(UPDATE)),
    "E405": _texts("S_t = tanh(S_{t-1}) + k_t v_tᵀ", "o_t = tanh(S_tᵀ q_t)"),
    "E406": _texts("k_t = l2norm(q_t)", "w_t = l2norm(q_t)"),
    "E407": _texts("S = S_{t-1} + k_t v_tᵀ", UPDATE),
    "E408": _texts("o_t = S_{t+1}ᵀ q_t", READ),
    "E409": _texts("const c = k_t", "const c = 1 / sqrt(K)"),
    "E410": Example(function("S = S + ld.outer(k, v)\nreturn S"), function(_PYTHON), "python"),
    "E411": Example(
        function(_PYTHON, "S, q: ld.K, k: ld.K, v"),
        function(_PYTHON, "S, q: ld.K, k: ld.K, v: ld.V"),
        "python",
    ),
    "E412": Example(
        function("if ld.sum(k) > 0:\n    S = S + ld.outer(k, v)\nreturn S, S.T @ q"),
        function("S = S + ld.relu(ld.sum(k)) * ld.outer(k, v)\nreturn S, S.T @ q"),
        "python",
    ),
    "E501": _texts("input f : scalar in (2, 1)", "input f : scalar in (1, 2)"),
    "E502": _texts("input f : scalar unit", "input f : [K] unit"),
    "E503": _texts("input f : scalar <= 0 in (0, 1)", "input f : scalar in (0, 1)"),
    "E902": _texts("S_t = S_{t-1} + k_{t-2} v_tᵀ", "S_t = S_{t-1} + k_{t-1} v_tᵀ"),
    "E903": _texts(
        "input w : [2, K]\nfor j in 0..2:\n    S_t = S_t + w_{t,j} v_tᵀ",
        "input w : [2, K]\nfor j in 1..2:\n    S_t = S_t + w_{t,j} v_tᵀ",
    ),
    "E951": _plans(
        "S_t = diag(k_t) S_{t-1} + S_{t-1} diag(v_t) + k_t v_tᵀ",
        "S_t = diag(k_t) S_{t-1} diag(v_t) + k_t v_tᵀ",
    ),
    "E952": _plans(
        "S_t = (I - k_t k_tᵀ) S_{t-1} (I - v_t v_tᵀ) + k_t v_tᵀ", "S_t = (I - k_t k_tᵀ) S_{t-1} + k_t v_tᵀ"
    ),
    "E953": _plans("input M : [K, V]\nS_t = S_{t-1} + M_t", UPDATE),
    "E954": _plans(
        "M_t = exp(g_t) M_{t-1} - beta_t S_{t-1}\nS_t = exp(g_t) S_{t-1} + beta_t M_{t-1} + k_t v_tᵀ",
        "M_t = exp(g_t) M_{t-1} + k_t v_tᵀ\nS_t = exp(g_t) S_{t-1} + beta_t M_{t-1}",
    ),
    "E955": _plans("S_t = exp(g_t) S_{t-1}", "S_t = exp(g_t) S_{t-1} + k_t v_tᵀ"),
    "E957": _plans("o_t = v_t", "o_t = S_tᵀ q_t + v_t"),
    "E958": _plans("n_t = n_{t-1} + k_t\no_t = (S_tᵀ q_t) / (1 + n_tᵀ q_t)", READ),
    "E959": _plans("S_t = S_{t-1} + k_t v_tᵀ + 1", UPDATE),
    "E961": _plans(
        "const c = log(-1)\nS_t = c S_{t-1} + k_t v_tᵀ", "const c = log(2)\nS_t = c S_{t-1} + k_t v_tᵀ"
    ),
    "E962": Example(
        "recurrence example\ninput k : [K] unit\ninput g : log gate\n"
        "S_t = exp(g_t) (I - k_t k_tᵀ) S_{t-1}\no_t = S_tᵀ k_t\n",
        whole("S_t = exp(g_t) (I - k_t k_tᵀ) S_{t-1} + k_t v_tᵀ\no_t = S_tᵀ k_t"),
        "plan",
    ),
    "E970": _plans(
        "A_t = A_{t-1} + k_t v_tᵀ\nS_t = exp(g_t) S_{t-1} + k_t v_tᵀ\no_t = tanh(A_t + S_t)ᵀ q_t",
        "A_t = A_{t-1} + k_t v_tᵀ\nS_t = exp(g_t) S_{t-1} + k_t v_tᵀ\no_t = tanh(A_tᵀ q_t + S_tᵀ q_t)",
    ),
}
