"""Any text gives a spec or a DslError, and soon."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse
from linalg_dsl.language.printer import show_spec
from linalg_dsl.language.spec import RecurrenceSpec

GOOD = [
    """recurrence gated_delta_rule
input q    : [K]
input k    : [K] unit  # promised
input v    : [V]
input g    : log gate
input beta : scalar in (0, 2)
const scale = 1 / sqrt(K)

S_t = exp(g_t) (I - beta_t k_t k_tᵀ) S_{t-1} + beta_t k_t v_tᵀ
o_t = scale S_tᵀ q_t
""",
    """# a description
recurrence many
const n = 2
input q : [K]
input kk : [n, K]
input vv : [2, V]
input bb : [n] in [0, 1)
input f : gate [K] <= 1
param u : [K]
state S : [K, V] = 0.5
output y
M_t = diag(f_t)
w_t = l2norm(kk_{t,1} ⊙ u)^2
S_t = M_t S_<t-1> + w_t vv[t,2].T - 0.5 (kk_tᵀ
    vv_t)
y_t = S_{t-1}^T q_t + max(bb_{t,n}, 1e-3) S_tᵀ w_t
""",
    """recurrence states
const n = 2
input q : [K]
input k : [n, K] unit
input v : [n, V]
input M : [K, K]
input g : log gate [V]
input f : gate [K, V] in (-1, 1)
input beta : [n] in (0, 2)
state m = -inf
state z : [K]
m_t = max(m_{t-1}, q_tᵀ k_{t,1})
z_t = tanh(z_{t-1} + k_{t-1,2}) / m_t
S_t = f_t ⊙ (M_t S_{t-1} diag(exp(g_t)))
for j in 1..n:
    u_t = k_{t,j}ᵀ S_t - v_{t,j}ᵀ
    S_t = S_t - beta_{t,j} k_{t,j} u_t
o_t = softmax(S_tᵀ q_t) / max(abs(z_tᵀ q_t), 1)
""",
]
WORDS = """
S_{t-1} S_t k_t v_tᵀ q_t exp( ( ) [ ] { } < > + - − * / ⊙ .* ^ ^2 ^T ᵀ .T ² I K V T diag( outer( , =
recurrence input param const state output for j in 1..n: : log gate scalar unit (0,1) <= 0 [K] [n,K] 0 1
0.5 1e9 1e999 1/0 1/3 99999999999999999999999999999999999999999999999999 _t _{t,1} _{ _< # l2norm( sum( min(
for j in 1..2: S_{t,j} k_{t,j} k_{t-1} k_{t-1,j} q_{t-1} m_t m_{t-1} z_t z_{t-1} [V,K] [K,n] [K,K] [K,V]
α k̂_t \\alpha " ∞ inf | ; ' k_tv_t ₜ ₁ o_t beta_t g_t scale S[t-1] v_t.T M_t
"""
BLANKS = ["\n", "\r\n", "\n    ", "\t", " ", "\u2028", "\x0b", "\x00", "\ufeff"]
PIECES = [*WORDS.split(), *BLANKS, "M_t = ", "\nS_t = ", "\n    S_t = ", "\nfor j in 1..n:\n    S_t = S_t"]
PIECES += [
    "\nstate m = -inf\n",
    "\nstate z : [K]\n",
    "\nz_t = z_{t-1} + ",
    "softmax(",
    "tanh(S_t)",
    "max(m_{t-1}, ",
]
QUICK = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])

salad = st.lists(st.sampled_from(PIECES), max_size=60).map(" ".join)
tight_salad = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(GOOD))
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, len(text)))
        j = min(len(text), i + draw(st.sampled_from([0, 1, 1, 3, 10])))
        k = draw(st.integers(0, len(text)))
        patch = draw(st.one_of(st.just(""), st.sampled_from(PIECES), st.just(text[k : k + 15])))
        text = text[:i] + patch + text[j:]
    return text


def outcome(text: str) -> RecurrenceSpec | DslError:
    begin = time.process_time()
    out: RecurrenceSpec | DslError
    try:
        out = parse(text)
    except DslError as err:
        out = err
    assert time.process_time() - begin < 2  # under a second where nothing else runs
    assert str(out)
    return out


@QUICK
@given(st.one_of(st.text(max_size=200), salad, tight_salad, mutated(), mutated()))
def test_any_text_gives_a_spec_that_reads_back_or_a_mistake(text: str) -> None:
    found = outcome(text)
    if isinstance(found, RecurrenceSpec):
        assert parse(show_spec(found)) == found


def chain(lines: list[str]) -> str:
    return "recurrence r\ninput k : [K]\ninput a : scalar\n" + "\n".join(lines) + "\no_t = k_t\n"


def line(value: str) -> str:
    head = "recurrence r\ninput q, k : [K]\ninput v : [V]\ninput a : scalar\n"
    return f"{head}b_t = {value}\nS_t = S_{{t-1}} + k_t v_tᵀ\no_t = S_tᵀ q_t\n"


def lines(first: str, later: str, count: int) -> str:
    body = [f"b0_t = {first}", *(f"b{i}_t = " + later.replace("b", f"b{i - 1}_t") for i in range(1, count))]
    return line("\n".join(body).removeprefix("b0_t = ").replace("\nb0", "\nb")).replace("b_t =", "b0_t =", 1)


LARGE = {
    "parentheses": line("(" * 15000 + "a_t" + ")" * 15000),
    "calls": line("exp(" * 39 + "a_t" + ")" * 39),
    "sum": line("+".join(["a_t"] * 7000)),
    "product": line(" ".join(["a_t"] * 1900)),
    "inner products": line(" ".join(["(k_tᵀq_t)"] * 900)),
    "quotients": line("/".join(["a_t"] * 1900)),
    "elementwise": line("⊙".join(["k_t"] * 3900)),
    "long numbers": line(" * ".join(["123456789012345678901234567890"] * 900)),
    "fractions": line(" + ".join(f"1/{7919 * i + 1}" for i in range(1, 1400))),
    "powers": line("(((2^64)^64)^64)^64"),
    "power tower": line("a_t" + "^2" * 9000),
    "transposes": line("k_t" + "ᵀ" * 20000),
    "signs": line("-" * 20000 + "a_t"),
    "clashes": line(" ".join(["k_t"] * 2000)),
    "doubling": lines("a_t", "b b", 900),
    "doubling sums": lines("a_t", "b + exp(b)", 900),
    "nesting bindings": lines("a_t", "exp(b)", 1000),
    "many bindings": lines("a_t", "a_t", 2000),
    "many unknown": lines("a_t", "zz_t", 2000),
    "many syntax errors": "x_t = )\n" * 4000,
    "many open brackets": "(\n" * 16000,
    "many open statements": "x_t = (\n" * 4000,
    "braces": "a_{" * 10000,
    "underscores": "a" + "_" * 32000,
    "letters": "a" * 32000,
    "digits": line("1" * 30000),
    "newlines": "\n" * 32000,
    "hashes": "#" * 32000,
    "ranges": "input x : scalar " + "in (0, 1) " * 3000,
    "consts": "const c0 = 2\n" + "\n".join(f"const c{i} = c{i - 1}^64" for i in range(1, 1000)),
    "many states": chain([f"x{i}_t = x{i}_{{t-1}} + k_t" for i in range(900)]),
    "states in a ring": chain([f"x{i}_t = x{(i + 1) % 900}_{{t-1}}" for i in range(900)]),
    "open states and bindings": chain(
        [f"x{i}_t = x{i}_{{t-1}} x{(i + 1) % 16}_{{t-1}}" for i in range(16)]
        + [f"b{i}_t = a_t x1_t" for i in range(1500)]
    ),
    "states against the order": chain(
        [f"x{i}_t = x{i}_{{t-1}} + x{i + 1}_t" for i in range(15)] + ["x15_t = x15_{t-1} + k_t"]
    ),
    "presents before their time": chain(
        ["x_t = x_{t-1} + " + " + ".join(["y_t"] * 3000), "y_t = y_{t-1} + k_t"]
    ),
    "lines before their time": chain([f"b{i}_t = y_t" for i in range(2500)] + ["y_t = y_{t-1} + k_t"]),
    "shifts of bindings": chain(["b0_t = k_t", *(f"b{i}_t = b{i - 1}_{{t-1}}" for i in range(1, 900))]),
    "many loops": chain(["for j in 1..2:\n    x_t = x_t + k_t"] * 900),
    "loops in loops": chain([" " * i + "for j in 1..2:" for i in range(200)]),
    "a long loop": chain(
        ["for j in 1..64:", *(f"    b{i}_t = x_t + a_t" for i in range(900)), "    x_t = x_t"]
    ),
    "nonlinear pairs": chain(
        [f"x{i}_t = " + " ".join(f"x{j}_{{t-1}}" for j in range(16)) + f" x{i}_{{t-1}}" for i in range(16)]
        * 12
    ),
    "too long": "x" * 1_000_000,
}


@pytest.mark.parametrize("name", LARGE)
def test_large_texts_are_read_or_refused_soon(name: str) -> None:
    outcome(LARGE[name])
