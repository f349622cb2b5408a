"""Functions with several states, shifts and substeps say the same as texts."""

# mypy: ignore-errors

from collections.abc import Callable

import pytest
from state_recurrences import text

import linalg_dsl.language.builder as ld
from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse

INF = float("inf")


def gated_oja(S, q: ld.K, k: ld.K, v: ld.V.unit, a: ld.LogGate(ld.V), beta: ld.Scalar(0, 1)):
    S = S @ ld.diag(ld.exp(a)) @ (ld.I - beta * ld.outer(v, v)) + beta * ld.outer(k, v)
    return S, S.T @ q


def state_V_K(S, q: ld.K, k: ld.K.unit, v: ld.V, beta: ld.Scalar(0, 1)):
    S = S @ (ld.I - beta * ld.outer(k, k)) + beta * ld.outer(v, k)
    return S, S @ q


def normalised_linear_attention(S, z: ld.State(), q: ld.K, k: ld.K, v: ld.V):
    q, k = ld.elu(q) + 1, ld.elu(k) + 1
    S, z = S + ld.outer(k, v), z + k
    return S, z, S.T @ q / (z.T @ q + 1e-6)


def mlstm(m: ld.State(start=-INF), S: ld.State(), n: ld.State(ld.K), q: ld.K, k: ld.K, v: ld.V,
          f: ld.LogGate, i: ld.Scalar):  # fmt: skip
    new = ld.max(f + m, i)
    keep, write = ld.exp(f + m - new), ld.exp(i - new)
    S = keep * S + write * ld.outer(k, v)
    n = keep * n + write * k
    return new, S, n, S.T @ q / ld.max(ld.abs(n.T @ q), ld.exp(-new))


def gsa(A: ld.State(ld.K, "n"), B: ld.State("n", ld.V), q: ld.K, k: ld.K, v: ld.V, g: ld.LogGate("n"), n=8):
    A = A @ ld.diag(ld.exp(g)) + ld.outer(k, 1 - ld.exp(g))
    B = ld.diag(ld.exp(g)) @ B + ld.outer(1 - ld.exp(g), v)
    return A, B, B.T @ ld.softmax(A.T @ q)


def mamba1(S, B: ld.K, C: ld.K, x: ld.V, delta: ld.V.within(0), A: ld.Param(ld.Matrix(ld.K, ld.V)),
           D: ld.Param(ld.V)):  # fmt: skip
    S = ld.exp(-ld.exp(A) @ ld.diag(delta)) * S + ld.outer(B, delta * x)
    return S, S.T @ C + D * x


def elementwise_gate(S, q: ld.K, k: ld.K, v: ld.V, g: ld.LogGate(ld.K, ld.V)):
    S = ld.exp(g) * S + ld.outer(k, v)
    return S, S.T @ q


def hgrn(h, c: ld.V, f: ld.Gate(ld.V)):
    h = f * h + (1 - f) * c
    return h, h


def momentum_delta(M, S: ld.State(), q: ld.K.unit, k: ld.K.unit, p: ld.K.unit, v: ld.V, mu: ld.Scalar(0, 1),
                   alpha: ld.Scalar(0, 1), beta: ld.Scalar(0, 1), eta: ld.Scalar(0, 1)):  # fmt: skip
    M = mu * M - eta * ld.outer(k, v - S.T @ p)
    S = alpha * S - beta * M
    return M, S, S.T @ q


def dense(S, q: ld.K, k: ld.K, v: ld.V, M: ld.Matrix(ld.K, ld.K), N: ld.Matrix(ld.V, ld.V)):
    S = M @ S @ N + ld.outer(k, v)
    return S, S.T @ q


def signed_gates(S, q: ld.K, k: ld.K, v: ld.V, f: ld.Gate(ld.K, low=-1, high=1, closed="neither"),
                 r: ld.Gate(low=0, high=1, closed="both")):  # fmt: skip
    S = r * ld.diag(f) @ S + ld.outer(k, v)
    return S, S.T @ q


def two_layers(A, B: ld.State(), q: ld.K, k: ld.K, p: ld.K, v: ld.V):
    A = A + ld.outer(k, v)
    u = ld.silu(A.T @ q)
    return A, B + ld.outer(p, u), B.T @ q + u


def counts_tokens(c, S: ld.State(), q: ld.K, k: ld.K, v: ld.V):
    c = c + 1
    S = (1 - 1 / c) * S + (1 / c) * ld.outer(k, v)
    return c, S, q.T @ S @ v


def read_of_the_last_token(u: ld.State(ld.V), S: ld.State(), q: ld.K, k: ld.K, v: ld.V):
    new = S.T @ q
    S = S + ld.outer(k, v - 0.5 * u)
    return new, S, S.T @ q


def mamba3(S, B: ld.K, C: ld.K, x: ld.V, delta: ld.Scalar(0), lam: ld.Scalar(0, 1),
           A: ld.Param(ld.Scalar(0))):  # fmt: skip
    a = ld.exp(-A * delta)
    S = a * S + (1 - lam) * delta * a * ld.outer(ld.prev(B), ld.prev(x)) + lam * delta * ld.outer(B, x)
    return S, S.T @ C


def shifted_bindings(S, q: ld.K, k: ld.K, v: ld.V, g: ld.LogGate(ld.K), mu: ld.Param(ld.K.within(0, 1))):
    k = ld.l2norm(mu * k)
    x = mu * k + (1 - mu) * ld.prev(k)
    S = ld.diag(ld.exp(ld.prev(g))) @ S + ld.outer(x, v)
    return S, S.T @ q


def gated_delta_product(S, q: ld.K, k: ld.Vectors("n", ld.K).unit, v: ld.Vectors("n", ld.V), g: ld.LogGate,
                        beta: ld.Scalars("n").within(0, 2), n=3):  # fmt: skip
    S = ld.exp(g) * S
    for j in ld.substeps(n):
        S = S - beta[j] * k[j] @ (k[j].T @ S - v[j].T)
    return S, S.T @ q


def substeps_of_everything(m, S: ld.State(), q: ld.K, k: ld.Vectors("n", ld.K).unit, v: ld.Vectors("n", ld.V),
                           a: ld.LogGate("n"), beta: ld.Scalars("n").within(0, 1), n=2):  # fmt: skip
    m, past = m + 1, S
    for i in ld.substeps("n"):
        m = ld.max(m, beta[i] + q.T @ k[i])
    x = q / m
    for j in ld.substeps(2):
        y = ld.l2norm(k[j] + ld.prev(k[j]))
        R = ld.exp(a[j]) * S
        S = R - beta[j] * y @ (y.T @ R - v[j].T) / m
    for _ in ld.substeps(3):
        S = (ld.I - ld.outer(x, x) / 20) @ S + ld.outer(x, v[0]) + 0.1 * past
    return m, S, S.T @ x + past.T @ q


@pytest.mark.parametrize(
    "function",
    [
        gated_oja, state_V_K, normalised_linear_attention, mlstm, gsa, mamba1, elementwise_gate, hgrn,
        momentum_delta, dense, signed_gates, two_layers, counts_tokens, read_of_the_last_token, mamba3,
        shifted_bindings, gated_delta_product, substeps_of_everything,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_function_and_text_are_one_recurrence(function: Callable) -> None:
    spec = ld.recurrence(function).spec
    assert spec == parse(text(function.__name__))
    assert parse(str(spec)) == spec


def test_a_present_state_is_told_by_identity_whatever_the_order() -> None:
    @ld.recurrence
    def f(a: ld.State(ld.K), b: ld.State(ld.K), c: ld.State(ld.K), k: ld.K):
        b = b + k
        c = c + b
        a = a + c
        return a, b, c, a + b + c

    assert [e.target for e in f.spec.written] == ["b", "c", "a", "o"]
    head = "recurrence f\nstate a, b, c : [K]\ninput k : [K]\n"
    assert f.spec == parse(
        head + "b_t = b_{t-1} + k_t\nc_t = c_{t-1} + b_t\na_t = a_{t-1} + c_t\no_t = a_t + b_t + c_t"
    )


def test_a_state_that_is_returned_as_it_came_or_twice() -> None:
    @ld.recurrence
    def f(a: ld.State(ld.K), b: ld.State(ld.K), c: ld.State(ld.K), k: ld.K):
        new = b + k
        return a, new, new, a + k

    head = "recurrence f\nstate a, b, c : [K]\ninput k : [K]\n"
    assert f.spec == parse(head + "a_t = a_{t-1}\nb_t = b_{t-1} + k_t\nc_t = b_t\no_t = a_t + k_t")


def test_an_input_that_is_returned_as_a_state_stays_an_input_elsewhere() -> None:
    @ld.recurrence
    def f(S, x: ld.State(ld.K), k: ld.K, v: ld.V):
        S = S + ld.outer(k + x, v)
        return S, k, S.T @ k

    head = "recurrence f\nstate S : [K, V]\nstate x : [K]\ninput k : [K]\ninput v : [V]\n"
    assert f.spec == parse(head + "S_t = S_{t-1} + (k_t + x_{t-1}) v_tᵀ\nx_t = k_t\no_t = S_tᵀ k_t")


def test_names_of_loop_indices_step_aside() -> None:
    @ld.recurrence
    def f(S, j: ld.Vectors(2, ld.K), v: ld.V):
        for i in ld.substeps(2):
            S = S + ld.outer(j[i], v)
        return S, S.T @ j[0]

    assert "for i in 1..2:" in str(f)
    assert parse(str(f)) == f.spec


def test_two_loops_over_two_states_may_be_one_loop_in_python() -> None:
    @ld.recurrence
    def f(S, n: ld.State(ld.K), k: ld.Vectors(2, ld.K), v: ld.V):
        for j in ld.substeps(2):
            S = S + ld.outer(k[j], v)
            n = 0.5 * n + k[j]
        return S, n, S.T @ n

    assert str(f).count("for j in 1..2:") == 2
    assert parse(str(f)) == f.spec


def codes(function: Callable) -> list[str]:
    with pytest.raises(DslError) as caught:
        print(ld.recurrence(function).spec)
    return [m.code for m in caught.value.mistakes]


def test_loops_that_are_no_substeps_of_one_state_are_refused() -> None:
    def after(S, k: ld.Vectors(2, ld.K), v: ld.V):
        for j in ld.substeps(2):
            S = S + ld.outer(k[j], v)
        S = 2 * S
        return S, S.T @ k[0]

    def entangled(S, n: ld.State(ld.K), k: ld.Vectors(2, ld.K), v: ld.V):
        for j in ld.substeps(2):
            S = S + ld.outer(k[j] + n, v)
            n = n + k[j]
        return S, n, S.T @ n

    def forgets(S, k: ld.Vectors(2, ld.K), v: ld.V):
        for j in ld.substeps(2):
            S = ld.outer(k[j], v)
        return S, S.T @ k[0]

    def nested(S, k: ld.Vectors(2, ld.K), v: ld.Vectors(2, ld.V)):
        for j in ld.substeps(2):
            for i in ld.substeps(2):
                S = S + ld.outer(k[j], v[i])
        return S, S.T @ k[0]

    def leaves(S, k: ld.Vectors(2, ld.K), v: ld.V):
        for j in ld.substeps(2):
            S = S + ld.outer(k[j], v)
            break
        return S, S.T @ k[0]

    def differs(S, k: ld.Vectors(2, ld.K), v: ld.V):
        signs = iter([1, 2])
        for j in ld.substeps(2):
            S = S + next(signs) * ld.outer(k[j], v)
        return S, S.T @ k[0]

    def read(S, k: ld.Vectors(2, ld.K), v: ld.V):
        for j in ld.substeps(2):
            x = S.T @ k[j]
            S = S + ld.outer(k[j], v)
        return S, S.T @ k[0] + x

    for function in (after, entangled, forgets, nested, leaves, differs, read):
        assert codes(function) == ["E903"], function.__name__
    with pytest.raises(DslError, match="E903"):
        next(iter(ld.substeps(2)))
    with pytest.raises(TypeError):
        ld.substeps(2.5)


def test_indices_and_counts_of_loops_are_checked() -> None:
    def escapes(S, k: ld.Vectors(2, ld.K), v: ld.V):
        for j in ld.substeps(2):
            S = S + ld.outer(k[j], v)
        return S, S.T @ k[j]

    def many(S, k: ld.Vectors(2, ld.K), v: ld.V):
        for j in ld.substeps(3):
            S = S + ld.outer(k[j], v)
        return S, S.T @ k[0]

    def unknown(S, k: ld.Vectors(2, ld.K), v: ld.V):
        for _ in ld.substeps("n"):
            S = S + ld.outer(k[0], v)
        return S, S.T @ k[0]

    assert codes(escapes) == ["E307"]
    assert codes(many) == ["E307"]
    assert codes(unknown) == ["E208"]


def test_only_inputs_are_shifted_and_once() -> None:
    def state(S, k: ld.K, v: ld.V):
        new = S + ld.outer(k, v)
        return new, new.T @ k + ld.prev(S).T @ k

    def twice(S, k: ld.K, v: ld.V):
        S = S + ld.outer(ld.prev(ld.prev(k)), v)
        return S, S.T @ k

    assert codes(state) == ["E902"]
    assert codes(twice) == ["E902"]
    with pytest.raises(TypeError):
        ld.prev(3)


def test_states_are_declared_by_axes() -> None:
    assert ld.State(ld.Scalar).dims == ()
    assert ld.State(ld.K, "n").dims == ("K", "n")
    assert ld.State().dims is None
    with pytest.raises(TypeError):
        ld.State(ld.Scalar, ld.K)
    with pytest.raises(ValueError, match="number"):
        ld.State(start=float("nan"))
