"""What is wrong with a text is said with code, place, rule and way out; all of it at once."""

import pytest

from linalg_dsl.errors import DslError
from linalg_dsl.language.parser import parse

HEAD = """recurrence r
input q, k : [K]
input v : [V]
input g : log gate
input beta : scalar in (0, 2)
const scale = 1 / sqrt(K)
"""
UPDATE = "S_t = S_{t-1} + k_t v_tᵀ"
READ = "o_t = S_tᵀ q_t"


def message(text: str) -> str:
    with pytest.raises(DslError) as caught:
        parse(text)
    return str(caught.value)


def codes(text: str) -> list[str]:
    with pytest.raises(DslError) as caught:
        parse(text)
    return [m.code for m in caught.value.mistakes]


def body(*lines: str) -> str:
    return HEAD + "\n".join(lines) + "\n"


SLIPS = {
    body("S_t = S_{t-1} + k_t v_t", READ): """\
<text>:7:21: E302: cannot multiply [K] by [V]
   7 | S_t = S_{t-1} + k_t v_t
                           ^^^
     note: this is [K]
   7 | S_t = S_{t-1} + k_t v_t
                       ^^^
     help: the outer product is `k_t v_tᵀ`""",
    body("S_t = S_t + k_t v_tᵀ", READ): """\
<text>:7:7: E401: `S_t` is used before it is defined
   7 | S_t = S_t + k_t v_tᵀ
             ^^^
     help: the state before the update is `S_{t-1}`""",
    body("S_t = exp(g_t) S_t-1 + k_t v_tᵀ", READ): """\
<text>:7:16: E401: `S_t` is used before it is defined
   7 | S_t = exp(g_t) S_t-1 + k_t v_tᵀ
                      ^^^
     help: an index of several signs stands in braces: `S_{t-1}`""",
    body("S_t = S_{t-1} + beta_tk_tv_tᵀ", READ): """\
<text>:7:17: E209: `beta_tk_tv_t` is one name
   7 | S_t = S_{t-1} + beta_tk_tv_tᵀ
                       ^^^^^^^^^^^^
     help: did you mean `beta_t k_t v_t`? A product needs a space""",
    body("S_t = sigmiod(g_t) S_{t-1} + k_t v_tᵀ", READ): """\
<text>:7:7: E201: unknown name `sigmiod`
   7 | S_t = sigmiod(g_t) S_{t-1} + k_t v_tᵀ
             ^^^^^^^
     help: did you mean `sigmoid`?""",
    body("S_t = β_t S_{t-1} + k_t v_tᵀ", READ): """\
<text>:7:7: E201: unknown name `β`
   7 | S_t = β_t S_{t-1} + k_t v_tᵀ
             ^^^
     help: did you mean `beta`?""",
    body("S_t = S_{t-1} + v_t k_tᵀ", READ): """\
<text>:7:17: E301: cannot add [K, V] and [V, K]
   7 | S_t = S_{t-1} + v_t k_tᵀ
                       ^^^^^^^^
     note: this is [K, V]
   7 | S_t = S_{t-1} + v_t k_tᵀ
             ^^^^^^^
     help: one of the two needs a transpose ᵀ""",
    body("S_t = S_{t-1} + k_t * v_tᵀ", READ): """\
<text>:7:23: E303: `*` between [K] and [V]ᵀ can mean two things
   7 | S_t = S_{t-1} + k_t * v_tᵀ
                             ^^^^
     note: this is [K]
   7 | S_t = S_{t-1} + k_t * v_tᵀ
                       ^^^
     help: write `@` for the matrix product, `⊙` for the elementwise one""",
    body("S_t = diag(k_t * k_t) S_{t-1} + k_t v_tᵀ", READ): """\
<text>:7:18: E303: `*` between [K] and [K] can mean two things
   7 | S_t = diag(k_t * k_t) S_{t-1} + k_t v_tᵀ
                        ^^^
     note: this is [K]
   7 | S_t = diag(k_t * k_t) S_{t-1} + k_t v_tᵀ
                  ^^^
     help: write `⊙` (or `.*`) for the elementwise product, `dot(x, y)` or `outer(x, y)` for the others""",
    body(UPDATE, "o_t = v_t ⊙ S_tᵀ q_t"): """\
<text>:8:13: E304: an elementwise product of [V] and [V, K]
   8 | o_t = v_t ⊙ S_tᵀ q_t
                   ^^^^
     note: this is [V]
   8 | o_t = v_t ⊙ S_tᵀ q_t
             ^^^
     help: products are read from left to right; did you mean `v_t ⊙ (S_tᵀ q_t)`?""",
    body("S_t = k_t ⊙ S_{t-1} + k_t v_tᵀ", READ): """\
<text>:7:13: E304: an elementwise product of [K] and [K, V]
   7 | S_t = k_t ⊙ S_{t-1} + k_t v_tᵀ
                   ^^^^^^^
     note: this is [K]
   7 | S_t = k_t ⊙ S_{t-1} + k_t v_tᵀ
             ^^^
     help: to scale the rows of a matrix write `diag(k_t) S_{t-1}`""",
    body("S_t = (1 - k_t) S_{t-1} + k_t v_tᵀ", READ): """\
<text>:7:17: E302: cannot multiply [K] by [K, V]
   7 | S_t = (1 - k_t) S_{t-1} + k_t v_tᵀ
                       ^^^^^^^
     note: this is [K]
   7 | S_t = (1 - k_t) S_{t-1} + k_t v_tᵀ
             ^^^^^^^^^
     help: to scale the rows of a matrix write `diag(1 - k_t) S_{t-1}`, for the product `(1 - k_t)ᵀ S_{t-1}`""",  # noqa: E501
    body(UPDATE, "o_t = q_tᵀ S_t"): """\
<text>:8:7: E308: the output is a column, not [V]ᵀ
   8 | o_t = q_tᵀ S_t
             ^^^^^^^^
     help: write the column: `o_t = S_tᵀ q_t`""",
    body("S_t = S_{t-1} + k v_tᵀ", READ): """\
<text>:7:17: E202: `k` changes with the token
   7 | S_t = S_{t-1} + k v_tᵀ
                       ^
     help: write `k_t`""",
    body(UPDATE, "o_t = scale_t S_tᵀ q_t"): """\
<text>:8:7: E203: `scale` is a const and has no time index
   8 | o_t = scale_t S_tᵀ q_t
             ^^^^^^^
     note: declared here
   6 | const scale = 1 / sqrt(K)
             ^^^^^
     help: write `scale`""",
    body("S_t = tanh(S_{t-1}) + k_t v_tᵀ", READ): """\
<text>:7:7: E405: the update of `S` is not linear in it: `tanh(S_{t-1})`
   7 | S_t = tanh(S_{t-1}) + k_t v_tᵀ
             ^^^^^^^^^^^^^
     help: a chunk form exists only where every term holds S_{t-1} once, outside functions; with \
`tanh` around the state this is a recurrent network of the kind of M2RNN; the nearest linear relative is \
without it, or has it around what is read""",
    body("S_t = exp(g_t (I - k_t k_tᵀ) S_{t-1}", READ): """\
<text>:7:10: E102: this `(` is never closed
   7 | S_t = exp(g_t (I - k_t k_tᵀ) S_{t-1}
                ^
     help: close it before the statement ends""",
    body("S_t = \\alpha S_{t-1} + k_t v_tᵀ", READ): """\
<text>:7:7: E101: TeX commands are not read
   7 | S_t = \\alpha S_{t-1} + k_t v_tᵀ
             ^^^^^^
     help: write the sign itself: `α` or `alpha`, `ᵀ` or `^T`, `⊙`""",
    body("S_t = S_{t-1} + k_t v_tᵀ +", READ): """\
<text>:7:27: E101: the line ends too early
   7 | S_t = S_{t-1} + k_t v_tᵀ +
                                 ^
     help: expected a name, a number, `(`, a sign or a function; a line goes on in the next one only inside brackets""",  # noqa: E501
    body("inputs w : [K]", UPDATE, READ): """\
<text>:7:1: E101: unknown declaration `inputs`
   7 | inputs w : [K]
       ^^^^^^
     help: did you mean `input`?""",
    body(UPDATE, "y_t = S_tᵀ q_t"): """\
<text>:1:12: E403: there is no output `o_t`
   1 | recurrence r
                  ^
     help: write `o_t = S_tᵀ q_t`; if `y_t` is the output, declare `output y`""",
    body("S_t = S_{t-1} + k_{t-2} v_tᵀ", READ): """\
<text>:7:17: E902: `k_{t-2}`: only one step back is supported
   7 | S_t = S_{t-1} + k_{t-2} v_tᵀ
                       ^^^^^^^
     help: write `k_{t-1}`, or pass the shifted tensor as an input of its own""",
    body("u_t = S_{t-1}ᵀ k_t", UPDATE, "o_t = S_tᵀ q_t + u_{t-1}"): """\
<text>:9:18: E902: `u_{t-1}` is a shift of what depends on the state `S`
   9 | o_t = S_tᵀ q_t + u_{t-1}
                        ^^^^^^^
     help: to carry it to the next token, declare it: `state u`""",
    body("for j in 1..3", "    S_t = S_t + k_t v_tᵀ", READ): """\
<text>:7:1: E101: a loop of substeps reads `for j in 1..n:`
   7 | for j in 1..3
       ^^^^^^^^^^^^^""",
    body("input w : [2, K]", "for j in 1..3:", "    S_t = S_t + w_{t,j} v_tᵀ", READ): """\
<text>:9:17: E307: the loop has 3 substeps, `w` 2 rows
   9 |     S_t = S_t + w_{t,j} v_tᵀ
                       ^^^^^^^
     note: declared here
   7 | input w : [2, K]
             ^""",
    body("for j in 1..2:", "    S_t = tanh(S_t) + k_t v_tᵀ", READ): """\
<text>:8:11: E405: the update of `S` is not linear in it: `tanh(S_t)`
   8 |     S_t = tanh(S_t) + k_t v_tᵀ
                 ^^^^^^^^^
     help: a chunk form exists only where every term holds S_{t-1} once, outside functions; with \
`tanh` around the state this is a recurrent network of the kind of M2RNN; the nearest linear relative is \
without it, or has it around what is read""",
}  # fmt: skip


@pytest.mark.parametrize("text", SLIPS, ids=lambda text: text.removeprefix(HEAD).split("\n")[0])
def test_full_message_of_a_typical_slip(text: str) -> None:
    assert message(text) == SLIPS[text]


HINTS = {
    "S_t = S_{t-1} ⊗ k_t": "write `k_t v_tᵀ` or `outer(k_t, v_t)`",
    "S_t = S_{t-1} + k_t × v_tᵀ": "write `⊙` for the elementwise product, nothing for the matrix product",
    "S_t = S_{t-1} + k_t v_t'": "write `ᵀ` or `^T` for a transpose, and no prime in a name",
    "S_t = S_{t-1} + {k_t v_tᵀ}": "group with parentheses",
    "S_t = S_{t-1} + .5 k_t v_tᵀ": "write `0.5`",
    "S_t = S_{t-1} + beta_t**2 k_t v_tᵀ": "write `x^2`",
    "S_t = S_{t-1} + beta_t⁻¹ k_t v_tᵀ": "write `x^(-1)`; there are no inverses of matrices",
    "S_t = S_{t-1} + k_t[0] v_tᵀ": "write k_t, k_{t-1}, or k_{t,1} for a row",
    "S_t = S_{t-1} + k_t 1ᵀ": "there is no vector of ones: for `(a_t 1ᵀ) ⊙ S_{t-1}` write "
    "`diag(a_t) S_{t-1}`",
    "S_t = S_{t-1} + (k_t / ‖k_t‖) v_tᵀ": "write `l2norm(x)` for a normalised vector, `sqrt(xᵀ x)` for a "
    "norm",
    "S_t = S_{t-1} + <k_t, q_t> k_t v_tᵀ": "write `xᵀ y` or `dot(x, y)` for an inner product",
    "S_t = S_{t-1} + ∑ k_t v_tᵀ": "over the rows of two [n, D] inputs the sum is their product, `k_tᵀ v_t`",
    "S_t = (I + k_t k_tᵀ)^{-1} S_{t-1}": "matrices have no inverses here, in updates or reads: a solve has "
    "no chunk form",
    "S_t = exp(k_t k_tᵀ) S_{t-1}": "there are no functions of matrices; one of a vector's elements is "
    "`diag(f(x))`",
    "S_t = S_{t-1} + k_tᵀ v_t": "vectors are columns, and the transpose of an outer product stands on its "
    "right: `x yᵀ`",
    "S_t == S_{t-1}": "write `x_t = ...`",
    "S_t += k_t v_tᵀ": "write `S_t = ...` in full",
    "input x : K": "did you mean `[K]`? kinds are [K], [V], [n, K], [n], scalar, log gate, gate",
    "input x : log_gate": "did you mean `log gate`? kinds are [K], [V], [n, K], [n], scalar, log gate, gate",
    "input x [K]": "expected `:` or `,`",
    "Input x : [K]": "did you mean `input`?",
    "const c : 1": "expected `=`",
    "  + k_t v_tᵀ": "a line goes on in the next one only inside brackets: put them around the whole",
    "x_t = exp g_t": "a function has its argument in parentheses: `exp(x_t)`",
    "x_t = T": "the transpose is written after a name: `k_tᵀ`, `k_t^T` or `k_t.T`",
    "x_t = (g_t + beta_t]": "brackets close in pairs",
}


@pytest.mark.parametrize("line", HINTS)
def test_hint_for_a_slip(line: str) -> None:
    text = body(line, *([] if line.startswith("S_t") else [UPDATE]), READ)
    with pytest.raises(DslError) as caught:
        parse(text)
    assert HINTS[line] in [m.hint for m in caught.value.mistakes]


CODES = {
    "E101": [
        body("hello world", UPDATE, READ),
        body("S_t := S_{t-1} + k_t v_tᵀ", READ),
        "",
        "# nothing",
        body(UPDATE + " ; " + READ),
        body("S_t = S_{t-1} + |k_t| v_tᵀ", READ),
        body("for j in 2", UPDATE, READ),
    ],
    "E102": [body("S_t = (I - k_t k_tᵀ)) S_{t-1}", READ)],
    "E103": [body("S_t = S_{t-1} + k_{j} v_tᵀ", READ), body("S_t = S_{t-1/2} + k_t v_tᵀ", READ)],
    "E104": ["recurrence r" + "x" * 70 + "\n" + body(UPDATE, READ)[13:]],
    "E105": [
        body("S_t = 1e99 S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = beta_t^65 S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = S_{t-1} / 0 + k_t v_tᵀ", READ),
        body("S_t = S_{t-1} / (2 - 2) + k_t v_tᵀ", READ),
        body("S_t = 0^(-1) S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = (-2)^0.5 S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = 1e50 1e50 S_{t-1} + k_t v_tᵀ".replace("50 1", "50 * 1"), READ),
    ],
    "E106": [body("S_t = beta_t^2^3 S_{t-1} + k_t v_tᵀ", READ), body("S_t = 2 3 S_{t-1} + k_t v_tᵀ", READ)],
    "E107": [
        body("x_t = " + "(" * 60 + "g_t" + ")" * 60, UPDATE, READ),
        body("x_t = " + " ".join(["g_t"] * 4100), UPDATE, READ),
        "x" * 40_000,
        body("x0_t = g_t", *(f"x{i}_t = x{i - 1}_t x{i - 1}_t" for i in range(1, 20)), UPDATE, READ),
        body("x0_t = g_t", *(f"x{i}_t = exp(x{i - 1}_t)" for i in range(1, 150)), UPDATE, READ),
    ],
    "E108": [
        body("input w : vector", UPDATE, READ),
        body("input w :", UPDATE, READ),
        body("input w : scalar [K]", UPDATE, READ),
        body("state S : scalar unit", UPDATE, READ),
    ],
    "E204": [
        body("input exp : scalar", UPDATE, READ),
        body("K_t = g_t", UPDATE, READ),
        "recurrence exp\n" + body(UPDATE, READ)[13:],
    ],
    "E205": [
        body("state k_prev : [K]", "k_prev_t = k_prev_{t-1} + k_{t-1}", UPDATE, READ),
        body("for q in 1..2:", "    S_t = S_t + k_t v_tᵀ", READ),
        body("for j in 1..2:", "    S_t = S_t + k_t v_tᵀ", UPDATE, READ),
        body("input q : [K]", UPDATE, READ),
        body(UPDATE, READ, "o_t = v_t"),
        body(UPDATE, UPDATE, READ),
    ],
    "E206": [body("input α, alpha : scalar", UPDATE, READ), body("β_t = g_t", UPDATE, READ)],
    "E207": [body("input w_t : [K]", UPDATE, READ)],
    "E208": [
        body("input w : [V, K]", UPDATE, READ),
        body("input w : [K, 2]", UPDATE, READ),
        body("input w : log gate [K, K]", UPDATE, READ),
        body("input w : gate [2, K]", UPDATE, READ),
        body("input w : [D]", UPDATE, READ),
        body("input w : [K, 2]", UPDATE, READ),
        body("input w : [scale, K]", UPDATE, READ),
        body("input w : [0, K]", UPDATE, READ),
        body("state S : [K, K, V]", UPDATE, READ),
    ],
    "E301": [
        body("state S : [K, V]", "S_t = S_{t-1} + k_t", READ),
        body("S_t = S_{t-1} + k_t v_tᵀ", "o_t = v_t + v_tᵀ"),
    ],
    "E304": [body(UPDATE, "o_t = v_t ⊙ S_tᵀ")],
    "E305": [
        body("S_t = S_{t-1} + max(k_t) v_tᵀ", READ),
        body("S_t = S_{t-1} + diag(k_tᵀ) k_t v_tᵀ", READ),
        body("S_t = exp(k_t k_tᵀ) S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = exp() S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = outer(k_t) + S_{t-1}", READ),
        body("S_t = min(k_t, v_t) v_tᵀ + S_{t-1}", READ),
        body("S_t = sum(g_t) S_{t-1} + k_t v_tᵀ", READ),
    ],
    "E306": [
        body("S_t = S_{t-1} + (k_t / v_t) v_tᵀ", READ),
        body("S_t = (k_t k_tᵀ)^2 S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = g_t^(k_t) S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = (k_t k_tᵀ / (q_t q_tᵀ)) S_{t-1} + k_t v_tᵀ", READ),
    ],
    "E307": [
        body("input w : [2, K]", "S_t = S_{t-1} + w_{t,3} v_tᵀ", READ),
        body("S_t = S_{t-1} + k_{t,1} v_tᵀ", READ),
        body("input w : [2, K]", "S_t = S_{t-1} + w_{t,i} v_tᵀ", READ),
        body(UPDATE, "o_t = S_{t,1}ᵀ q_t"),
    ],
    "E308": [body("S_t = k_tᵀ S_{t-1}", READ), body(UPDATE, "o_t = S_t"), body("S_t = S_{t-1}ᵀ", READ)],
    "E309": [
        body("S_t = (k_t + I) v_tᵀ + S_{t-1}", READ),
        body("S_t = exp(I) S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = exp(I + g_t) S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = I^2 S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = S_{t-1} / I + k_t v_tᵀ", READ),
        body("S_t = I ⊙ S_{t-1} + k_t v_tᵀ", READ),
    ],
    "E401": [
        body(READ, UPDATE),
        body(UPDATE.replace("{t-1}", "t"), READ),
        body("S_t = exp(g_t) S_{t-1}", READ, "for j in 1..2:", "    S_t = S_t + k_t v_tᵀ"),
    ],
    "E402": [
        body(UPDATE, "o_t = S_tᵀ q_t + r_t", "r_t = v_t"),
        body("S_t = S_{t-1} + w_{t-1} v_tᵀ", "w_t = g_t k_t", READ),
        body("for j in 1..2:", "    u_t = S_tᵀ k_t", "    S_t = S_t - k_t u_tᵀ", "o_t = S_tᵀ q_t + u_t"),
    ],
    "E403": [body(UPDATE), body("output S", UPDATE)],
    "E404": [body("o_t = v_t"), body("state S : [K, V]", "o_t = S_{t-1}ᵀ q_t")],
    "E405": [
        body("S_t = S_{t-1} S_{t-1}ᵀ S_{t-1} + k_t v_tᵀ", READ),
        body("S_t = S_{t-1} / (k_tᵀ S_{t-1} v_t) + k_t v_tᵀ", READ),
        body("S_t = S_{t-1} ⊙ S_{t-1}", READ),
        body("S_t = S_{t-1}^2", READ),
        body("u_t = S_{t-1}ᵀ k_t", "S_t = S_{t-1} + k_t (u_t ⊙ u_t)ᵀ", READ),
        body("S_t = dot(S_{t-1}ᵀ k_t, S_{t-1}ᵀ q_t) k_t v_tᵀ", READ),
        body("S_t = g_t^(k_tᵀ S_{t-1} v_t) k_t v_tᵀ", READ),
        body("a_t = a_{t-1} + tanh(S_{t-1}ᵀ k_t)", "S_t = S_{t-1} + k_t a_tᵀ", READ),
        body("a_t = exp(a_{t-1}) ⊙ (S_{t-1}ᵀ k_t)", "S_t = S_{t-1} + k_t a_tᵀ", READ),
        body("a_t = beta_t a_{t-1} + k_tᵀ S_{t-1} v_t", "S_t = a_t S_{t-1} + k_t v_tᵀ", READ),
    ],
    "E406": [body("k_t = l2norm(q_t)", UPDATE, READ), body("scale_t = g_t", UPDATE, READ)],
    "E407": [body("S = S_{t-1} + k_t v_tᵀ", READ), body("S_{t-1} = S_{t-1} + k_t v_tᵀ", READ)],
    "E408": [body(UPDATE, "o_t = S_{t+1}ᵀ q_t")],
    "E409": [
        body("const c = g", UPDATE, READ),
        body("const c = d", "const d = 2", UPDATE, READ),
        body("const c = k_t", UPDATE, READ),
    ],
    "E501": [
        body("input f : scalar in (2, 1)", UPDATE, READ),
        body("input f : scalar in (1, 1]", UPDATE, READ),
        body("input f : scalar >= inf", UPDATE, READ),
    ],
    "E502": [body("input f : scalar unit", UPDATE, READ), body("input f : log gate [K] unit", UPDATE, READ)],
    "E503": [
        body("input f : scalar <= 0 in (0, 1)", UPDATE, READ),
        body("input f : [K] unit unit", UPDATE, READ),
    ],
    "E902": [
        body("w_t = S_{t-1}ᵀ k_t", "S_t = S_{t-1} + k_t v_tᵀ", "o_t = S_tᵀ q_t + w_{t-1}"),
        body("w_t = k_{t-1}", "S_t = S_{t-1} + w_{t-1} v_tᵀ", READ),
        body("S_t = S_{t-1} + k_{t-2} v_tᵀ", READ),
        body("S_t = S_{t-1} + S_{t-2}", READ),
    ],
    "E903": [
        body("for j in 0..2:", "    S_t = S_t + k_t v_tᵀ", READ),
        body("for j in 1..2:", "S_t = S_{t-1} + k_t v_tᵀ", READ),
        body("for j in 1..2:", "    S_t = S_t + k_t v_tᵀ", "    n_t = n_t + k_t", "o_t = S_tᵀ n_t"),
        body("for j in 1..2:", "    S_t = S_t + k_t v_tᵀ", "    u_t = k_t", READ),
        body("for j in 1..2:", "    input w : [K]", "    S_t = S_t + k_t v_tᵀ", READ),
        body(
            "input w : [2, K]",
            "for j in 1..2:",
            "    for i in 1..2:",
            "        S_t = S_t + w_{t,i} v_tᵀ",
            READ,
        ),
    ],
}


@pytest.mark.parametrize(("code", "text"), [(c, t) for c, texts in CODES.items() for t in texts])
def test_a_mistake_is_reported_alone_under_its_code(code: str, text: str) -> None:
    assert codes(text) == [code]


@pytest.mark.parametrize(
    "lines",
    [
        ["z_t = 0", "x_t = g_t / z_t"],
        ["p_t = 100", "x_t = g_t^(p_t)"],
        ["x_t = 1e50 g_t", "y_t = 1e50 x_t"],
        ["m_t = -2", "x_t = m_t^0.5"],
    ],
)
def test_numbers_behind_bindings_are_checked_too(lines: list[str]) -> None:
    assert codes(body(*lines, UPDATE, READ)) == ["E105"]


def test_all_mistakes_are_reported_at_once_in_order() -> None:
    text = body(
        "input w : vector",
        "input h : [D]",
        "x_t = foo_t",
        "S_t = (S_{t-1} + k_t v_t",
        "z_t = ) + 3",
        "y_t = k_t + v_t",
        "o_t = v_tᵀ + bar_t",
    )
    assert codes(text) == ["E108", "E208", "E201", "E102", "E102", "E301", "E201"]


def test_several_mistakes_of_one_line_are_reported() -> None:
    assert codes(body("S_t = foo_t S_{t-1} + exp(k_t, v_t) bar_tᵀ", READ)) == ["E201", "E305", "E201"]


def test_a_lost_declaration_is_no_reason_to_complain_about_its_name() -> None:
    assert codes(body("input w, u : vectr", "S_t = S_{t-1} + w_t u_tᵀ", READ)) == ["E108"]
    assert codes(body("S_t = (S_{t-1}", READ)) == ["E102"]


def test_a_lost_line_hides_no_other_name() -> None:
    assert codes(body("x_t = k_t )", "S_t = S_{t-1} + kk_t v_tᵀ", READ)) == ["E102", "E201"]


def test_mistakes_are_many_but_not_endless() -> None:
    assert len(codes(body(*(f"x{i}_t = nothing_t" for i in range(900))))) == 50


def test_a_wide_line_is_shown_in_part() -> None:
    text = message(body("S_t = S_{t-1} + " + "k_t v_tᵀ + " * 300 + "oops_t", READ))
    assert max(map(len, text.split("\n"))) < 200
    excerpt, caret = text.split("\n")[1:3]
    assert excerpt[caret.index("^") :].startswith("oops_t"[: caret.count("^")])


def test_a_caret_stands_under_its_word_after_tabs_and_combining_marks() -> None:
    text = message(
        HEAD.replace("input q", "input k̂, q") + "S_t =\tk\u0302_t v_tᵀ + oops_t + S_{t-1}\n" + READ
    )
    excerpt, caret = text.split("\n")[1:3]
    before = excerpt[: excerpt.index("oops")].replace("\u0302", "")
    assert caret[: caret.index("^")].expandtabs() == " " * len(before.expandtabs())
