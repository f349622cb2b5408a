"""Python functions and texts give equal specs; mistakes in functions point into them."""

import sys
import textwrap
from fractions import Fraction

import pytest

import linalg_dsl.language.builder as ld
from linalg_dsl.errors import DslError
from linalg_dsl.language.builder import PythonRecurrence
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import Interval

# mypy: ignore-errors

SCALE = 1 / ld.sqrt(ld.K)


@ld.recurrence
def linear_attention(S, q: ld.K, k: ld.K, v: ld.V):
    """Katharopoulos et al. 2020."""
    S = S + ld.outer(k, v)
    return S, S.T @ q


@ld.recurrence
def retnet(S, q: ld.K, k: ld.K, v: ld.V, gamma: ld.Param(ld.Scalar(0, 1)), scale=SCALE):
    S = gamma * S + ld.outer(k, v)
    return S, scale * S.T @ q


@ld.recurrence
def gla(S, q: ld.K, k: ld.K, v: ld.V, g: ld.LogGate(ld.K), scale=SCALE):
    S = ld.diag(ld.exp(g)) @ S + ld.outer(k, v)
    return S, scale * S.T @ q


@ld.recurrence
def sigmoid_gla(S, q: ld.K, k: ld.K, v: ld.V, a: ld.Scalar, tau=16):
    alpha = ld.sigmoid(a) ** (1 / tau)
    S = alpha * S + ld.outer(k, v)
    return S, S.T @ q


@ld.recurrence
def rwkv6(S, r: ld.K, k: ld.K, v: ld.V, w: ld.LogGate(ld.K), u: ld.Param(ld.K)):
    new = ld.diag(ld.exp(w)) @ S + ld.outer(k, v)
    return new, (S + ld.diag(u) @ ld.outer(k, v)).T @ r


@ld.recurrence
def hgrn2(S, q: ld.K, f: ld.Gate(ld.K, low=0, high=1, closed="neither"), v: ld.V):
    S = ld.diag(f) @ S + ld.outer(1 - f, v)
    return S, S.T @ q


@ld.recurrence
def gated_delta_rule(S, q: ld.K, k: ld.K.unit, v: ld.V, g: ld.LogGate, beta: ld.Scalar(0, 2), scale=SCALE):
    S = ld.exp(g) * (ld.I - beta * ld.outer(k, k)) @ S + beta * ld.outer(k, v)
    return S, scale * S.T @ q


@ld.recurrence
def kda(S, q: ld.K, k: ld.K.unit, v: ld.V, g: ld.LogGate(ld.K), beta: ld.Scalar(0, 2)):
    decayed = ld.diag(ld.exp(g)) @ S
    S = decayed + ld.outer(beta * k, v - decayed.T @ k)
    return S, S.T @ q


@ld.recurrence
def dplr(S, q: ld.K, k: ld.K, v: ld.V, a: ld.K.unit, b: ld.K.unit, g: ld.LogGate(ld.K, high=2)):
    S = (ld.diag(ld.exp(g)) + ld.outer(b, a)) @ S + ld.outer(k, v)
    return S, S.T @ q


@ld.recurrence
def gdn2(S, q: ld.K, k: ld.K, v: ld.V, g: ld.LogGate(ld.K), b: ld.K, w: ld.V):
    S = (ld.I - k @ (b * k).T) @ ld.diag(ld.exp(g)) @ S + k @ (w * v).T
    return S, S.T @ q


@ld.recurrence
def two_steps(
    S, q: ld.K, k: ld.Vectors("n", ld.K).unit, v: ld.Vectors("n", ld.V), beta: ld.Scalars("n"), n=2
):
    for j in range(2):
        S = S - beta[j] * ld.outer(k[j], S.T @ k[j] - v[j])
    return S, S.T @ q


@ld.recurrence
def functions(S, q: ld.K, k: ld.K, v: ld.V, x: ld.Scalar(low=0, closed="left")):
    key = ld.l2norm(ld.silu(k)) / (1 + ld.softplus(-x) ** 2)
    gate = ld.clamp(ld.min(x, 1) - ld.max(ld.abs(x), 0.5) / 3, -1, 0)
    S = ld.exp(-gate) * S + key @ ld.tanh(v).T * ld.dot(ld.softmax(k), q) * ld.sum(ld.relu(k))
    return S, -(S.T @ q) + ld.elu(ld.rsqrt(ld.sign(x) + 2)) * v


TEXTS = {
    linear_attention: """
        input q, k : [K]
        input v : [V]
        S_t = S_{t-1} + k_t v_tᵀ
        o_t = S_tᵀ q_t""",
    retnet: """
        input q, k : [K]
        input v : [V]
        param gamma : scalar in (0, 1)
        const scale = 1 / sqrt(K)
        S_t = gamma S_{t-1} + k_t v_tᵀ
        o_t = scale S_tᵀ q_t""",
    gla: """
        input q, k : [K]
        input v : [V]
        input g : log gate [K]
        const scale = 1 / sqrt(K)
        S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ
        o_t = scale S_tᵀ q_t""",
    sigmoid_gla: """
        input q, k : [K]
        input v : [V]
        input a : scalar
        const tau = 16
        α_t = sigmoid(a_t)^(1/tau)
        S_t = α_t S_{t-1} + k_t v_tᵀ
        o_t = S_tᵀ q_t""",
    rwkv6: """
        input r, k : [K]
        input v : [V]
        input w : log gate [K]
        param u : [K]
        S_t = diag(exp(w_t)) S_{t-1} + k_t v_tᵀ
        o_t = (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ r_t""",
    hgrn2: """
        input q : [K]
        input f : gate [K] in (0, 1)
        input v : [V]
        S_t = diag(f_t) S_{t-1} + (1 - f_t) v_tᵀ
        o_t = S_tᵀ q_t""",
    gated_delta_rule: """
        input q : [K]
        input k : [K] unit
        input v : [V]
        input g : log gate
        input beta : scalar in (0, 2)
        const scale = 1 / sqrt(K)
        S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ
        o_t = scale S_tᵀ q_t""",
    kda: """
        input q : [K]
        input k : [K] unit
        input v : [V]
        input g : log gate [K]
        input beta : scalar in (0, 2)
        D_t = diag(exp(g_t)) S_{t-1}
        S_t = D_t + (beta_t k_t) (v_t - D_tᵀ k_t)ᵀ
        o_t = S_tᵀ q_t""",
    dplr: """
        input q, k : [K]
        input v : [V]
        input a, b : [K] unit
        input g : log gate [K] in (-inf, 2]
        S_t = (diag(exp(g_t)) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ
        o_t = S_tᵀ q_t""",
    gdn2: """
        input q, k : [K]
        input v : [V]
        input g : log gate [K]
        input b : [K]
        input w : [V]
        S_t = (I - k_t (b_t ⊙ k_t)ᵀ) diag(exp(g_t)) S_{t-1} + k_t (w_t ⊙ v_t)ᵀ
        o_t = S_tᵀ q_t""",
    two_steps: """
        input q : [K]
        input k : [n, K] unit
        input v : [n, V]
        input beta : [n]
        const n = 2
        R_t = S_{t-1} - beta_{t,1} k_{t,1} (S_{t-1}ᵀ k_{t,1} - v_{t,1})ᵀ
        S_t = R_t - beta_{t,2} k_{t,2} (R_tᵀ k_{t,2} - v_{t,2})ᵀ
        o_t = S_tᵀ q_t""",
    functions: """
        input q, k : [K]
        input v : [V]
        input x : scalar >= 0
        key_t = l2norm(silu(k_t)) / (1 + softplus(-x_t)^2)
        gate_t = clamp(min(x_t, 1) - max(abs(x_t), 0.5) / 3, -1, 0)
        w_t = key_t tanh(v_t)ᵀ dot(softmax(k_t), q_t) sum(relu(k_t))
        S_t = exp(-gate_t) S_{t-1} + w_t
        o_t = -S_tᵀ q_t + elu(rsqrt(sign(x_t) + 2)) v_t""",
}


@pytest.mark.parametrize("function", TEXTS, ids=lambda f: f.__name__)
def test_function_and_text_give_equal_specs(function: PythonRecurrence) -> None:
    text = f"recurrence {function.__name__}\n" + textwrap.dedent(TEXTS[function])
    assert function.spec == parse(text)
    assert parse(str(function)) == function.spec


def test_name_and_docstring_are_the_functions() -> None:
    assert linear_attention.__name__ == linear_attention.spec.name == "linear_attention"
    assert linear_attention.__doc__ == linear_attention.spec.doc == "Katharopoulos et al. 2020."


def test_the_argument_is_the_past_state_and_the_returned_object_the_present() -> None:
    @ld.recurrence
    def exclusive(S, q: ld.K, k: ld.K, v: ld.V):
        new = S + ld.outer(k, v)
        return new, S.T @ q

    @ld.recurrence
    def both(S, q: ld.K, k: ld.K, v: ld.V):
        new = S + ld.outer(k, v)
        return new, (new - S).T @ q

    head = "input q, k : [K]\ninput v : [V]\nS_t = S_{t-1} + k_t v_tᵀ\n"
    assert exclusive.spec == parse("recurrence exclusive\n" + head + "o_t = S_{t-1}ᵀ q_t")
    assert both.spec == parse("recurrence both\n" + head + "o_t = (S_t - S_{t-1})ᵀ q_t")


def test_a_state_between_is_neither() -> None:
    @ld.recurrence
    def decayed(S, q: ld.K, k: ld.K, v: ld.V, g: ld.LogGate):
        S = ld.exp(g) * S
        read = S.T @ q
        S = S + ld.outer(k, v)
        return S, read

    text = "input q, k : [K]\ninput v : [V]\ninput g : log gate\nS_t = exp(g_t) S_{t-1} + k_t v_tᵀ\n"
    assert decayed.spec == parse("recurrence decayed\n" + text + "o_t = (exp(g_t) S_{t-1})ᵀ q_t")


def test_works_without_source_code() -> None:
    scope: dict[str, object] = {"ld": ld}
    code = (
        "@ld.recurrence\ndef f(S, q: ld.K, k: ld.K, v: ld.V):\n    S = S + k @ v.T\n    return S, S.T @ q\n"
    )
    exec(compile(code, "<no file>", "exec"), scope)
    function = scope["f"]
    assert isinstance(function, PythonRecurrence)
    assert function.spec.updates == linear_attention.spec.updates
    assert function.spec.inputs[0].span is None


def test_postponed_annotations_are_read() -> None:
    scope: dict[str, object] = {"ld": ld}
    code = """
from __future__ import annotations
@ld.recurrence
def f(S, q: ld.K, k: ld.K, v: ld.V, beta: ld.Scalar(0, 2) = None):
    S = S + k @ v.T
    return S, S.T @ q
"""
    exec(compile(code.replace(" = None", ""), "<no file>", "exec"), scope)
    function = scope["f"]
    assert isinstance(function, PythonRecurrence)
    assert function.spec.inputs[3].range == Interval(0.0, 2.0)


def test_functions_may_call_functions_and_loop() -> None:
    def erase(k, beta):
        return ld.I - beta * ld.outer(k, k)

    @ld.recurrence
    def product(S, q: ld.K, k: ld.Vectors(3, ld.K), v: ld.V, beta: ld.Scalars(3)):
        M = ld.I
        for j in range(3):
            M = erase(k[j], beta[j]) @ M
        S = M @ S + ld.outer(q, v)
        return S, S.T @ q

    factors = " ".join(f"(I - beta_{{t,{j}}} k_{{t,{j}}} k_{{t,{j}}}ᵀ)" for j in (3, 2, 1))
    text = "recurrence product\ninput q : [K]\ninput k : [3, K]\ninput v : [V]\ninput beta : [3]\n"
    assert product.spec == parse(f"{text}S_t = {factors} S_{{t-1}} + q_t v_tᵀ\no_t = S_tᵀ q_t")


def test_numbers_of_python_are_exact_fractions() -> None:
    @ld.recurrence
    def numbers(S, q: ld.K, v: ld.V, third=1 / 3, tenth=Fraction(1, 10), tiny=1e-6, scale=SCALE):
        S = S + ld.outer(q, v) * 0.1
        return S, S.T @ q * third * tenth * tiny * scale

    text = "recurrence numbers\ninput q : [K]\ninput v : [V]\nconst third = 1/3\nconst tenth = 0.1\n" \
           "const tiny = 1e-6\nconst scale = 1 / sqrt(K)\nS_t = S_{t-1} + q_t v_tᵀ 0.1\n" \
           "o_t = S_tᵀ q_t third tenth tiny scale"  # fmt: skip
    assert numbers.spec == parse(text)


def test_an_output_called_o_steps_aside_for_an_input_called_o() -> None:
    @ld.recurrence
    def f(S, o: ld.K, v: ld.V):
        S = S + ld.outer(o, v)
        return S, S.T @ o

    assert f.spec.outputs[0].target == "y"
    assert parse(str(f)) == f.spec


def test_states_of_other_shapes_are_declared() -> None:
    @ld.recurrence
    def f(S: ld.State(ld.V, ld.K), q: ld.K, v: ld.V):
        S = S + ld.outer(v, q)
        return S, S @ q

    assert f.spec.states[0].dims == ("V", "K")


# -- mistakes ---------------------------------------------------------------------------------
def mistakes(function: object) -> DslError:
    with pytest.raises(DslError) as caught:
        print(ld.recurrence(function).spec)
    return caught.value


def codes(function: object) -> list[str]:
    return [m.code for m in mistakes(function).mistakes]


def test_all_mistakes_point_into_the_function() -> None:
    def f(S, q: ld.K, k: ld.K, v: ld.V):
        S = S + k @ v
        return S, ld.exp(S.T @ v)

    found = mistakes(f).mistakes
    assert [m.code for m in found] == ["E302", "E302"]
    spans = [m.span for m in found]
    assert all(s is not None and s.origin == __file__ for s in spans)
    texts = [s.text[s.start : s.end] for s in spans if s is not None]
    if sys.version_info >= (3, 11):
        assert texts == ["k @ v", "S.T @ v"]
    else:  # without columns: the whole lines
        assert texts == ["S = S + k @ v", "return S, ld.exp(S.T @ v)"]


def test_values_that_are_not_there_cannot_be_asked_for() -> None:
    def branches(S, q: ld.K, g: ld.LogGate):
        return (S, S.T @ q) if g else (S, q)

    def compares(S, q: ld.K, g: ld.LogGate):
        return (S, S.T @ q) if g > 0 else (S, q)

    def equals(S, q: ld.K, g: ld.LogGate):
        return (S, S.T @ q) if g == 0 else (S, q)

    def iterates(S, q: ld.K):
        return S, list(q)

    def converts(S, q: ld.K, g: ld.LogGate):
        return float(g) * S, S.T @ q

    for function in (branches, compares, equals, iterates, converts):
        assert codes(function) == ["E412"]


def test_what_is_returned_must_be_state_and_output() -> None:
    def alone(S, q: ld.K):
        return S

    def three(S, q: ld.K):
        return S, q, q

    def strange(S, q: ld.K):
        return S, "o"

    for function in (alone, three, strange):
        assert codes(function) == ["E410"]


def test_parameters_must_say_what_they_are() -> None:
    assert codes(lambda S, q: (S, q)) == ["E104", "E411"]

    def nothing(S, q):
        return S, q

    def wrong(S, q: int):
        return S, q

    def both(S, q: ld.K = 3):
        return S, q

    def star(S, *q: ld.K):
        return S, S

    for function in (nothing, wrong, both, star):
        assert codes(function) == ["E411"]


def test_the_state_comes_first() -> None:
    def no_state(q: ld.K):
        return q, q

    assert codes(no_state) == ["E404"]


def test_mistakes_of_the_language_are_found_in_functions_too() -> None:
    def k_t(S, k_t: ld.K, v: ld.V):
        return S + ld.outer(k_t, v), k_t

    def nonlinear(S, q: ld.K, v: ld.V):
        S = ld.tanh(S)
        return S, S.T @ q

    def elementwise(S, q: ld.K, v: ld.V):
        S = S + q * v
        return S, S.T @ q

    def rows(S, q: ld.K, v: ld.V):
        S = S + ld.outer(q[0], v)
        return S, S.T @ q

    def zero(S, q: ld.K, v: ld.V):
        S = S / 0
        return S, S.T @ q

    def huge(S, q: ld.K, v: ld.V):
        S = S * 1e300
        return S, S.T @ q

    assert "E207" in codes(k_t)
    assert codes(nonlinear) == ["E405"]
    assert codes(elementwise) == ["E304"]
    assert codes(rows) == ["E307"]
    assert codes(zero) == ["E105"]
    assert codes(huge) == ["E105"]


@pytest.mark.parametrize("times", [20, 3000])
def test_expressions_that_explode_are_refused(times: int) -> None:
    def doubling(S, q: ld.K, v: ld.V, a: ld.Scalar):
        for _ in range(times):
            a = a * a
        return a * S, S.T @ q

    def nested(S, q: ld.K, v: ld.V, a: ld.Scalar):
        for _ in range(times * 10):
            a = ld.exp(a)
        return S, S.T @ (a * q)

    assert codes(doubling) == ["E107"]
    assert codes(nested) == ["E107"]


def test_operands_of_other_libraries_are_type_errors() -> None:
    with pytest.raises(TypeError):
        ld.K + "x"
    with pytest.raises(TypeError):
        ld.exp("x")
    with pytest.raises(TypeError):
        ld.Param("x")
    with pytest.raises(ValueError, match="closed"):
        ld.Scalar(0, 1, closed="open")
    with pytest.raises(TypeError):
        ld.recurrence(3)
