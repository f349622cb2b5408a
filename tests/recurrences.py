"""Recurrences as users write them, each with the form (1) that it must come to."""

from __future__ import annotations

from dataclasses import dataclass, field

COMMON = """
input q, k, p, b : [K]
input v, w : [V]
input beta, gamma : scalar in (0, 2)
input g : log gate
input h : log gate [K]
const scale = 1 / sqrt(K)
"""
READ = "o_t = scale S_tᵀ q_t\n"


@dataclass(frozen=True)
class Case:
    """The lines of a recurrence, and what is expected, expressions as ``show_expr`` writes them.

    ``reads`` are (kind, query, scale).
    """

    lines: str
    left: list[str]
    written: list[str]
    log: str = "0"
    sigma: list[list[str]] = field(default_factory=list)
    erase: list[str] = field(default_factory=list)
    erase_read: str = "decayed"
    reads: list[tuple[str, str, str]] = field(default_factory=lambda: [("inclusive", "q_t", "scale")])
    token_terms: list[str] = field(default_factory=list)
    kind: str = ""
    axis: str = "K"
    value_log: str = "0"
    signed: list[str] = field(default_factory=list)
    """What the signs of both decays are made of."""

    def text(self, name: str) -> str:
        lines = self.lines if "o_t" in self.lines else self.lines.rstrip() + "\n" + READ
        declared = COMMON
        own = [x.strip() for x in lines.splitlines() if x.strip().startswith(("input", "param", "const"))]
        names = {n.strip(" :") for x in own for n in x.split(":")[0].split(None, 1)[1].split(",")}
        kept = []
        for line in declared.strip().splitlines():
            if not line.startswith("input"):
                kept.append(line)
                continue
            head, tail = line.split(":", 1)
            left = [n.strip() for n in head[len("input") :].split(",") if n.strip() not in names]
            used = [n for n in left if f"{n}_t" in lines]
            if used:
                kept.append(f"input {', '.join(used)} :{tail}")
        if "scale" not in lines:
            kept = [x for x in kept if not x.startswith("const")]
        return f"recurrence {name}\n" + "\n".join(kept) + "\n" + lines.strip() + "\n"


PUBLISHED = {
    "linear_attention": Case(
        "S_t = S_{t-1} + k_t v_tᵀ", ["k_t"], ["v_t"], erase_read="exclusive", kind="linear"
    ),
    "retnet": Case(
        "param gamma : scalar in (0, 1)\nS_t = gamma S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "log(gamma)", erase_read="exclusive", kind="scalar gate",
    ),
    "simple_gla": Case(
        "S_t = exp(g_t) S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "g_t", erase_read="exclusive", kind="scalar gate",
    ),
    "mamba2": Case(
        "input x : [V]\ninput dt : scalar >= 0\nparam a : scalar\nparam d : [V]\n"
        "S_t = exp(-exp(a) dt_t) S_{t-1} + k_t (dt_t x_t)ᵀ\no_t = S_tᵀ q_t + d ⊙ x_t",
        ["k_t"], ["dt_t x_t"], "-exp(a) dt_t", erase_read="exclusive",
        reads=[("inclusive", "q_t", "1")], token_terms=["d ⊙ x_t"], kind="scalar gate",
    ),
    "gla": Case(
        "S_t = diag(exp(h_t)) S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "h_t", erase_read="exclusive", kind="diagonal gate",
    ),
    "sigmoid_gla": Case(
        "input a : scalar\nconst tau = 16\nα_t = sigmoid(a_t)^(1/tau)\nS_t = α_t S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "-1/16 softplus(-a_t)", erase_read="exclusive", kind="scalar gate",
    ),
    "rwkv6": Case(
        "param u : [K]\nS_t = diag(exp(h_t)) S_{t-1} + k_t v_tᵀ\n"
        "o_t = scale (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t",
        ["k_t"], ["v_t"], "h_t", erase_read="exclusive",
        reads=[("exclusive", "q_t", "scale")],
        token_terms=["scale dot(k_t ⊙ u, q_t) v_t"], kind="diagonal gate",
    ),
    "hgrn2": Case(
        "input f : gate [K] in (0, 1)\nS_t = diag(f_t) S_{t-1} + (1 - f_t) v_tᵀ",
        ["1 - f_t"], ["v_t"], "log(f_t)", erase_read="exclusive", kind="diagonal gate",
    ),
    "delta_rule": Case(
        "S_t = (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ",
        ["k_t"], ["beta_t v_t"], "0", [["-beta_t"]], ["k_t"], "exclusive", kind="linear + rank 1",
    ),
    "delta_rule_residual": Case(
        "S_t = S_{t-1} - beta_t k_t (S_{t-1}ᵀ k_t - v_t)ᵀ",
        ["k_t"], ["beta_t v_t"], "0", [["-beta_t"]], ["k_t"], "exclusive", kind="linear + rank 1",
    ),
    "delta_rule_inner": Case(
        "S_t = S_{t-1} + k_t (beta_t (v_t - S_{t-1}ᵀ k_t))ᵀ",
        ["k_t"], ["beta_t v_t"], "0", [["-beta_t"]], ["k_t"], "exclusive", kind="linear + rank 1",
    ),
    "gated_delta_rule": Case(
        "S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ",
        ["k_t"], ["beta_t v_t"], "g_t", [["-beta_t"]], ["k_t"], kind="scalar gate + rank 1",
    ),
    "q_delta": Case(
        "S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}ᵀ p_t)ᵀ",
        ["k_t"], ["beta_t v_t"], "g_t", [["-beta_t"]], ["p_t"], kind="scalar gate + rank 1",
    ),
    "comba": Case(
        "param d : scalar\nS_t = exp(g_t) S_{t-1} - beta_t k_t p_tᵀ S_{t-1} + gamma_t k_t v_tᵀ\n"
        "o_t = scale S_tᵀ (q_t - d k_t)",
        ["k_t"], ["gamma_t v_t"], "g_t", [["-beta_t"]], ["p_t"], "exclusive",
        reads=[("inclusive", "q_t - d k_t", "scale")], kind="scalar gate + rank 1",
    ),
    "comba_spread": Case(
        "param d : scalar\nS_t = (exp(g_t) I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ\n"
        "o_t = scale S_tᵀ q_t - d scale S_tᵀ k_t",
        ["k_t"], ["beta_t v_t"], "g_t", [["-beta_t"]], ["k_t"], "exclusive",
        reads=[("inclusive", "q_t - d k_t", "scale")], kind="scalar gate + rank 1",
    ),
    "kda": Case(
        "S_t = (I - beta_t k_t k_tᵀ) diag(exp(h_t)) S_{t-1} + beta_t k_t v_tᵀ",
        ["k_t"], ["beta_t v_t"], "h_t", [["-beta_t"]], ["k_t"], kind="diagonal gate + rank 1",
    ),
    "kda_spread": Case(
        "a_t = exp(h_t)\nS_t = (diag(a_t) - beta_t k_t (a_t ⊙ k_t)ᵀ) S_{t-1} + beta_t k_t v_tᵀ",
        ["k_t"], ["beta_t v_t"], "h_t", [["-beta_t"]], ["k_t"], kind="diagonal gate + rank 1",
    ),
    "gdn2": Case(
        "S_t = (I - k_t (b_t ⊙ k_t)ᵀ) diag(exp(h_t)) S_{t-1} + k_t (w_t ⊙ v_t)ᵀ",
        ["k_t"], ["w_t ⊙ v_t"], "h_t", [["-1"]], ["b_t ⊙ k_t"], kind="diagonal gate + rank 1",
    ),
    "efla": Case(
        "y_t = (1 - exp(-beta_t k_tᵀ k_t)) / (k_tᵀ k_t)\n"
        "S_t = (I - y_t k_t k_tᵀ) S_{t-1} + y_t k_t v_tᵀ",
        ["k_t"], ["(1 - exp(-beta_t dot(k_t, k_t))) (1 / dot(k_t, k_t)) v_t"], "0",
        [["-(1 - exp(-beta_t dot(k_t, k_t))) (1 / dot(k_t, k_t))"]], ["k_t"], "exclusive",
        kind="linear + rank 1",
    ),
    "rodimus": Case(
        "a_t = exp(-softplus(gamma_t) beta_t)\nx_t = l2norm(k_t) softplus(gamma_t)^beta_t\n"
        "S_t = a_t S_{t-1} + x_t (sigmoid(w_t) ⊙ v_t)ᵀ",
        ["l2norm(k_t)"], ["softplus(gamma_t)^(beta_t) (sigmoid(w_t) ⊙ v_t)"], "-softplus(gamma_t) beta_t",
        erase_read="exclusive", kind="scalar gate",
    ),
    "eda": Case(
        "P_t = (I - gamma_t p_t p_tᵀ) (exp(g_t) S_{t-1})\n"
        "S_t = (I - beta_t k_t k_tᵀ) P_t + beta_t k_t v_tᵀ",
        ["k_t", "p_t"], ["beta_t v_t", "0"], "g_t",
        [["beta_t gamma_t dot(k_t, p_t)", "-beta_t"], ["-gamma_t", "0"]], ["p_t", "k_t"],
        kind="scalar gate + rank 2",
    ),
    "iplr": Case(
        "S_t = (I + b_t p_tᵀ) S_{t-1} + k_t v_tᵀ",
        ["k_t", "b_t"], ["v_t", "0"], "0", [["0"], ["1"]], ["p_t"], "exclusive", kind="linear + rank 1",
    ),
    "dplr": Case(
        "S_t = (diag(exp(h_t)) + b_t p_tᵀ) S_{t-1} + k_t v_tᵀ",
        ["k_t", "b_t"], ["v_t", "0"], "h_t", [["0"], ["1"]], ["p_t"], "exclusive",
        kind="diagonal gate + rank 1",
    ),
    "rwkv7": Case(
        "input x : [K] unit\ninput i : [K] in (0, 1)\nparam rho : [K]\n"
        "S_t = (diag(exp(h_t)) - (i_t ⊙ x_t) x_tᵀ) S_{t-1} + k_t v_tᵀ\n"
        "o_t = S_tᵀ q_t + (q_tᵀ (rho ⊙ k_t)) v_t",
        ["k_t", "i_t ⊙ x_t"], ["v_t", "0"], "h_t", [["0"], ["-1"]], ["x_t"], "exclusive",
        reads=[("inclusive", "q_t", "1")], token_terms=["dot(q_t, rho ⊙ k_t) v_t"],
        kind="diagonal gate + rank 1",
    ),
}  # fmt: skip

OTHERS = {
    "decay_after_erase": Case(
        "S_t = diag(exp(h_t)) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ",
        ["k_t", "exp(h_t) ⊙ k_t"], ["beta_t v_t", "0"], "h_t", [["0"], ["-beta_t"]], ["k_t"], "exclusive",
        kind="diagonal gate + rank 1",
    ),
    "undecayed_erase": Case(
        "S_t = diag(exp(h_t)) S_{t-1} - beta_t k_t (k_tᵀ S_{t-1}) + beta_t k_t v_tᵀ",
        ["k_t"], ["beta_t v_t"], "h_t", [["-beta_t"]], ["k_t"], "exclusive", kind="diagonal gate + rank 1",
    ),
    "scalar_decay_after_erase_is_before": Case(
        "S_t = (I - beta_t k_t k_tᵀ) (exp(g_t) S_{t-1}) + beta_t k_t v_tᵀ",
        ["k_t"], ["beta_t v_t"], "g_t", [["-beta_t"]], ["k_t"], kind="scalar gate + rank 1",
    ),
    "two_gates": Case(
        "S_t = exp(g_t) (I - beta_t k_t k_tᵀ) diag(exp(h_t)) S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "g_t + h_t", [["-beta_t"]], ["k_t"], kind="diagonal gate + rank 1",
    ),
    "gated_delta_product": Case(
        "input k : [2, K] unit\ninput v : [2, V]\ninput beta : [2] in (0, 2)\n"
        "S_t = (I - beta_{t,2} k_{t,2} k_{t,2}ᵀ) (exp(g_t) (I - beta_{t,1} k_{t,1} k_{t,1}ᵀ) S_{t-1}"
        " + beta_{t,1} k_{t,1} v_{t,1}ᵀ) + beta_{t,2} k_{t,2} v_{t,2}ᵀ",
        ["k_{t,1}", "k_{t,2}"],
        ["beta_{t,1} v_{t,1}",
         "beta_{t,2} (-beta_{t,1} dot(k_{t,2}, k_{t,1}) v_{t,1} + v_{t,2})"],
        "g_t",
        [["-beta_{t,1}", "0"],
         ["beta_{t,2} beta_{t,1} dot(k_{t,2}, k_{t,1})", "-beta_{t,2}"]],
        ["k_{t,1}", "k_{t,2}"], kind="scalar gate + rank 2",
    ),
    "rank_two_matrices": Case(
        "M_t = (I - beta_t k_t k_tᵀ) diag(exp(h_t)) (I - gamma_t p_t p_tᵀ)\nS_t = M_t S_{t-1} + k_t v_tᵀ",
        ["k_t", "exp(h_t) ⊙ p_t"], ["v_t", "0"], "h_t",
        [["beta_t gamma_t dot(k_t ⊙ exp(h_t), p_t)", "-beta_t"], ["-gamma_t", "0"]],
        ["p_t", "k_t ⊙ exp(h_t)"], "exclusive", kind="diagonal gate + rank 2",
    ),
    "one_left_two_erases": Case(
        "S_t = S_{t-1} - beta_t k_t k_tᵀ S_{t-1} - gamma_t k_t p_tᵀ S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "0", [["-1"]], ["beta_t k_t + gamma_t p_t"], "exclusive", kind="linear + rank 1",
    ),
    "one_erase_two_lefts": Case(
        "S_t = S_{t-1} - beta_t k_t k_tᵀ S_{t-1} - beta_t p_t k_tᵀ S_{t-1} + b_t v_tᵀ",
        ["b_t", "k_t + p_t"], ["v_t", "0"], "0", [["0"], ["-beta_t"]], ["k_t"], "exclusive",
        kind="linear + rank 1",
    ),
    "one_written_two_lefts": Case(
        "S_t = exp(g_t) S_{t-1} + k_t v_tᵀ + beta_t p_t v_tᵀ",
        ["k_t + beta_t p_t"], ["v_t"], "g_t", erase_read="exclusive", kind="scalar gate",
    ),
    "rows": Case(
        "input k : [2, K]\ninput v : [2, V]\nS_t = exp(g_t) S_{t-1} + k_tᵀ v_t",
        ["k_{t,1}", "k_{t,2}"], ["v_{t,1}", "v_{t,2}"], "g_t", erase_read="exclusive", kind="scalar gate",
    ),
    "rows_delta": Case(
        "const n = 2\ninput k : [n, K]\ninput v : [n, V]\ninput beta : [n]\n"
        "S_t = S_{t-1} + k_tᵀ diag(beta_t) (v_t - k_t S_{t-1})",
        ["k_{t,1}", "k_{t,2}"], ["beta_{t,1} v_{t,1}", "beta_{t,2} v_{t,2}"], "0",
        [["-beta_{t,1}", "0"], ["0", "-beta_{t,2}"]], ["k_{t,1}", "k_{t,2}"], "exclusive",
        kind="linear + rank 2",
    ),
    "one_minus": Case(
        "input f : gate [K] in (0, 1)\nS_t = S_{t-1} - diag(f_t) S_{t-1} + f_t v_tᵀ",
        ["f_t"], ["v_t"], "log(1 - f_t)", erase_read="exclusive", kind="diagonal gate",
    ),
    "one_minus_sigmoid": Case(
        "input a : [K]\nS_t = (I - diag(sigmoid(a_t))) S_{t-1} + sigmoid(a_t) v_tᵀ",
        ["sigmoid(a_t)"], ["v_t"], "-softplus(a_t)", erase_read="exclusive", kind="diagonal gate",
    ),
    "decayed_read": Case(
        "S_t = diag(exp(h_t)) S_{t-1} + k_t v_tᵀ\no_t = (diag(exp(h_t)) S_{t-1})ᵀ q_t",
        ["k_t"], ["v_t"], "h_t", erase_read="exclusive", reads=[("decayed", "q_t", "1")],
        kind="diagonal gate",
    ),
    "read_in_the_middle": Case(
        "R_t = diag(exp(h_t)) S_{t-1}\nS_t = R_t + k_t (v_t - R_tᵀ k_t)ᵀ\no_t = R_tᵀ q_t + S_tᵀ k_t",
        ["k_t"], ["v_t"], "h_t", [["-1"]], ["k_t"],
        reads=[("decayed", "q_t", "1"), ("inclusive", "k_t", "1")], kind="diagonal gate + rank 1",
    ),
    "read_after_an_erase": Case(
        "R_t = (I - p_t p_tᵀ) S_{t-1}\nS_t = R_t + k_t v_tᵀ\no_t = R_tᵀ q_t",
        ["k_t", "p_t"], ["v_t", "0"], "0", [["0"], ["-1"]], ["p_t"], "exclusive",
        reads=[("exclusive", "q_t - dot(p_t, q_t) p_t", "1")], kind="linear + rank 1",
    ),
    "both_reads": Case(
        "S_t = exp(g_t) S_{t-1} + k_t v_tᵀ\no_t = 0.5 S_tᵀ q_t - S_{t-1}ᵀ p_t",
        ["k_t"], ["v_t"], "g_t", erase_read="exclusive",
        reads=[("inclusive", "q_t", "0.5"), ("exclusive", "p_t", "-1")], kind="scalar gate",
    ),
    "gated_read": Case(
        "S_t = exp(g_t) S_{t-1} + k_t v_tᵀ\no_t = w_t ⊙ (S_tᵀ q_t) + v_t",
        ["k_t"], ["v_t"], "g_t", erase_read="exclusive", reads=[("inclusive", "q_t", "1")],
        token_terms=["v_t"], kind="scalar gate",
    ),
    "constant_gate": Case(
        "S_t = 0.9 (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ",
        ["k_t"], ["beta_t v_t"], "log(0.9)", [["-beta_t"]], ["k_t"],
        kind="scalar gate + rank 1",
    ),
    "normalised_keys": Case(
        "k̂_t = l2norm(k_t)\nS_t = (I - sigmoid(beta_t) k̂_t k̂_tᵀ) S_{t-1} + sigmoid(beta_t) k̂_t v_tᵀ",
        ["l2norm(k_t)"], ["sigmoid(beta_t) v_t"], "0", [["-sigmoid(beta_t)"]], ["l2norm(k_t)"], "exclusive",
        kind="linear + rank 1",
    ),
    "divided_keys": Case(
        "S_t = (I - k_t k_tᵀ / (k_tᵀ k_t + 1)) S_{t-1} + k_t v_tᵀ / (1 + k_tᵀ k_t)",
        ["k_t"], ["(1 / (1 + dot(k_t, k_t))) v_t"], "0", [["-1 / (dot(k_t, k_t) + 1)"]], ["k_t"], "exclusive",
        kind="linear + rank 1",
    ),
    "invented": Case(
        "a_t = exp(-softplus(h_t) * beta_t)\n"
        "S_t = (diag(a_t) - beta_t p_t (a_t ⊙ k_t)ᵀ) S_{t-1} + beta_t p_t (sigmoid(w_t) ⊙ v_t)ᵀ",
        ["p_t"], ["beta_t (sigmoid(w_t) ⊙ v_t)"], "-beta_t softplus(h_t)", [["-beta_t"]], ["k_t"],
        kind="diagonal gate + rank 1",
    ),
}  # fmt: skip

GATE = "input z : [V]\na_t = exp(-softplus(z_t))\n"
TURNED = "state S : [V, K]\n"
WIDER = {
    "gated_oja": Case(
        GATE + "S_t = S_{t-1} diag(a_t) (I - beta_t v_t v_tᵀ) + beta_t k_t v_tᵀ",
        ["v_t"], ["beta_t k_t"], "-softplus(z_t)", [["-beta_t"]], ["v_t"], axis="V",
        kind="diagonal gate + rank 1 on the value side",
    ),
    "gated_oja_turned": Case(
        TURNED + GATE + "S_t = (I - beta_t v_t v_tᵀ) diag(a_t) S_{t-1} + beta_t v_t k_tᵀ\n"
        "o_t = scale S_t q_t",
        ["v_t"], ["beta_t k_t"], "-softplus(z_t)", [["-beta_t"]], ["v_t"], axis="V",
        kind="diagonal gate + rank 1 on the value side",
    ),
    "gated_oja_of_channels": Case(
        GATE + "S_t = S_{t-1} diag(a_t) (I - v_t (w_t ⊙ v_t)ᵀ) + k_t (w_t ⊙ v_t)ᵀ",
        ["w_t ⊙ v_t"], ["k_t"], "-softplus(z_t)", [["-1"]], ["v_t"], axis="V",
        kind="diagonal gate + rank 1 on the value side",
    ),
    "delta_rule_turned": Case(
        TURNED + "S_t = S_{t-1} (I - beta_t k_t k_tᵀ) + beta_t v_t k_tᵀ\no_t = scale S_t q_t",
        ["k_t"], ["beta_t v_t"], "0", [["-beta_t"]], ["k_t"], "exclusive", kind="linear + rank 1",
    ),
    "value_gate": Case(
        GATE + "S_t = S_{t-1} diag(a_t) + k_t v_tᵀ",
        ["v_t"], ["k_t"], "-softplus(z_t)", erase_read="exclusive", axis="V",
        kind="diagonal gate on the value side",
    ),
    "value_gate_read_back": Case(
        GATE + "S_t = S_{t-1} diag(a_t) + k_t v_tᵀ\no_t = S_{t-1} w_t + q_t",
        ["v_t"], ["k_t"], "-softplus(z_t)", erase_read="exclusive", axis="V",
        reads=[("exclusive", "w_t", "1")], token_terms=["q_t"], kind="diagonal gate on the value side",
    ),
    "value_scalar_gate": Case(
        "S_t = exp(g_t) S_{t-1} (I - beta_t w_t v_tᵀ) + gamma_t k_t v_tᵀ",
        ["v_t"], ["gamma_t k_t"], "g_t", [["-beta_t"]], ["w_t"], axis="V",
        kind="scalar gate + rank 1 on the value side",
    ),
    "value_undecayed_erase": Case(
        GATE + "S_t = S_{t-1} diag(a_t) - S_{t-1} (beta_t v_t w_tᵀ) + k_t v_tᵀ\no_t = S_{t-1}ᵀ q_t",
        ["v_t", "w_t"], ["k_t", "0"], "-softplus(z_t)", [["0"], ["-beta_t"]], ["v_t"], "exclusive", axis="V",
        reads=[("exclusive", "q_t", "1")], kind="diagonal gate + rank 1 on the value side",
    ),
    "kda_read_across": Case(
        "S_t = (I - beta_t k_t k_tᵀ) diag(exp(h_t)) S_{t-1} + beta_t k_t v_tᵀ\no_t = q_t ⊙ (S_t w_t)",
        ["k_t"], ["beta_t v_t"], "h_t", [["-beta_t"]], ["k_t"], reads=[("inclusive", "w_t", "1")],
        kind="diagonal gate + rank 1",
    ),
    "scalar_gate_read_across": Case(
        "S_t = exp(g_t) S_{t-1} + k_t v_tᵀ\no_t = exp(g_t) S_{t-1} w_t",
        ["k_t"], ["v_t"], "g_t", erase_read="exclusive", reads=[("decayed", "w_t", "1")], kind="scalar gate",
    ),
    "separable": Case(
        GATE + "S_t = (sigmoid(b_t) a_tᵀ) ⊙ S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "-softplus(-b_t)", erase_read="exclusive", value_log="-softplus(z_t)",
        kind="separable gate",
    ),
    "separable_decayed_read": Case(
        GATE + "R_t = diag(exp(h_t)) S_{t-1} diag(a_t)\nS_t = R_t + k_t v_tᵀ\no_t = R_t w_t",
        ["k_t"], ["v_t"], "h_t", erase_read="exclusive", value_log="-softplus(z_t)",
        reads=[("decayed", "w_t", "1")], kind="separable gate",
    ),
    "separable_erase": Case(
        GATE + "S_t = (I - beta_t k_t k_tᵀ) diag(exp(h_t)) S_{t-1} diag(a_t) + beta_t k_t v_tᵀ",
        ["k_t"], ["beta_t v_t"], "h_t", [["-beta_t"]], ["k_t"], value_log="-softplus(z_t)",
        kind="separable gate + rank 1",
    ),
    "separable_erase_of_two": Case(
        GATE + "S_t = (exp(g_t) I - beta_t k_t p_tᵀ - gamma_t b_t k_tᵀ) S_{t-1} diag(a_t) + k_t v_tᵀ"
        "\no_t = S_{t-1}ᵀ q_t + S_tᵀ k_t",
        ["k_t", "b_t"], ["v_t", "0"], "g_t", [["-beta_t", "0"], ["0", "-gamma_t"]], ["p_t", "k_t"],
        "exclusive", value_log="-softplus(z_t)",
        reads=[("exclusive", "q_t", "1"), ("inclusive", "k_t", "1")], kind="separable gate + rank 2",
    ),
    "separable_erase_on_the_value_side": Case(
        "S_t = diag(exp(h_t)) S_{t-1} (I - beta_t v_t w_tᵀ) + k_t v_tᵀ",
        ["v_t", "w_t"], ["k_t", "0"], "0", [["0"], ["-beta_t"]], ["v_t"], "exclusive", axis="V",
        value_log="h_t", kind="separable gate + rank 1 on the value side",
    ),
    "only_low_rank": Case(
        "S_t = b_t p_tᵀ S_{t-1} + k_t v_tᵀ",
        ["k_t", "b_t"], ["v_t", "0"], "-inf", [["0"], ["1"]], ["p_t"], "exclusive", kind="pure rank 1",
    ),
    "only_low_rank_on_the_value_side": Case(
        "S_t = S_{t-1} (v_t w_tᵀ + beta_t w_t v_tᵀ) + k_t v_tᵀ\no_t = S_{t-1}ᵀ q_t",
        ["v_t", "w_t"], ["k_t", "0"], "-inf", [["0", "beta_t"], ["1", "0"]], ["v_t", "w_t"], "exclusive",
        axis="V", reads=[("exclusive", "q_t", "1")], kind="pure rank 2 on the value side",
    ),
    "four_erases": Case(
        "input e : [4, K] unit\nS_t = exp(g_t) (S_{t-1} - e_tᵀ (e_t S_{t-1})) + k_t v_tᵀ",
        ["k_t", "e_{t,1}", "e_{t,2}", "e_{t,3}", "e_{t,4}"], ["v_t", "0", "0", "0", "0"], "g_t",
        [["0"] * 4, *([["0"] * i + ["-1"] + ["0"] * (3 - i) for i in range(4)])],
        ["e_{t,1}", "e_{t,2}", "e_{t,3}", "e_{t,4}"], kind="scalar gate + rank 4",
    ),
    "signed_scalar_gate": Case(
        "S_t = (1 - beta_t) S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "log_size(1 - beta_t)", erase_read="exclusive", signed=["1 - beta_t"],
        kind="signed scalar gate",
    ),
    "signed_gate_and_erase": Case(
        "S_t = (I - beta_t k_t k_tᵀ) diag(tanh(b_t)) S_{t-1} + k_t v_tᵀ\no_t = S_{t-1}ᵀ q_t + S_tᵀ k_t",
        ["k_t"], ["v_t"], "log_size(tanh(b_t))", [["-beta_t"]], ["k_t"], signed=["tanh(b_t)"],
        reads=[("exclusive", "q_t", "1"), ("inclusive", "k_t", "1")],
        kind="signed diagonal gate + rank 1",
    ),
    "signed_separable": Case(
        "S_t = (diag(tanh(b_t)) - beta_t k_t p_tᵀ) S_{t-1} diag(tanh(w_t)) + k_t v_tᵀ\no_t = S_{t-1} v_t",
        ["k_t"], ["v_t"], "log_size(tanh(b_t))", [["-beta_t"]], ["p_t"], "exclusive",
        value_log="log_size(tanh(w_t))", signed=["tanh(b_t)", "tanh(w_t)"],
        reads=[("exclusive", "v_t", "1")], kind="signed separable gate + rank 1",
    ),
    "gate_of_either_sign_and_zero": Case(
        "input a : [K]\nS_t = -exp(g_t) diag(relu(a_t)) S_{t-1} + k_t v_tᵀ",
        ["k_t"], ["v_t"], "g_t + log_size(relu(a_t))", erase_read="exclusive", signed=["-1"],
        kind="signed diagonal gate",
    ),
}  # fmt: skip
"""Transitions and gates on the value side, separable gates, reads along the other axis, transitions of low
rank alone, signed gates."""

ALL = PUBLISHED | OTHERS | WIDER
