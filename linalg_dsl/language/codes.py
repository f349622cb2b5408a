"""The codes of mistakes in a recurrence, each with a paragraph that explains it.

Codes are stable: a code never changes its meaning and is never used again for another one.
E1 syntax, E2 names, E3 shapes, E4 time and structure, E5 promises, E9 what cannot be computed, or not in
chunks (from E950 on: found by the planner).
"""

from __future__ import annotations

EXPLANATIONS: dict[str, str] = {
    "E101": """The text does not follow the grammar at this place. A recurrence is a list of lines: a
    heading `recurrence name`, declarations (`input q, k : [K]`, `const scale = 1 / sqrt(K)`), and
    equations (`S_t = ...`, `o_t = ...`). A line goes on in the next one only inside brackets.""",
    "E102": """A bracket has no partner. Lines are joined inside brackets, so one that is never closed
    would swallow what follows; the search for its partner ends at the next declaration or equation.""",
    "E103": """An index is the token, `_t` or `_{t}`, the token before, `_{t-1}`, or one row of an
    [n, K] input at the token, `_{t,1}`. The forms `_<t-1>` and `[t-1]` mean the same.""",
    "E104": """A name is a word of letters, digits and underscores (Greek and accented letters too) that
    begins with a letter. Its time index is not part of it.""",
    "E105": """A number, or the result of arithmetic with numbers, is out of bounds: at most 40 digits,
    magnitudes from 1e-60 to 1e60, exponents of powers at most 64, and nothing divided by zero.""",
    "E106": """The text can be read in two ways, so parentheses are needed: `x^y^z`, or two numbers side
    by side. Or a number is transposed: papers write `1ᵀ` for a row of ones, here 1 is the number.""",
    "E107": """The text is longer, nested deeper, or expands to more terms than the limits allow. A
    binding counts once for every place where it is used.""",
    "E108": """A declaration says what a name is with words that are not known here. Kinds are `[K]`,
    `[V]`, `[n, K]`, `[n, V]`, `[n]`, `[K, K]`, `[V, V]`, `[K, V]`, `scalar`, `log gate`, `gate`, and gates
    `[K]`, `[V]`, `[n]`, `[K, V]`; properties are `unit` and ranges such as `in (0, 2)`, `in [0, 1)`,
    `<= 0`.""",
    "E201": """A name is used that nothing declares and no equation defines.""",
    "E202": """An input, a binding or a state changes with the token and is written with its index,
    `k_t`.""",
    "E203": """Params, consts and the dimensions K and V do not change with the token and carry no
    time index.""",
    "E204": """Function names, I (the identity), K and V (the dimensions), T (the transpose) and t (the
    token) cannot be declared.""",
    "E205": """A name is declared or assigned more than once. Each has one meaning throughout; give
    intermediate results names of their own.""",
    "E206": """Two names have the same spelling in ASCII, which generated code uses (`α` and `alpha`).""",
    "E207": """A declaration names the tensor without its time index: `input k : [K]`; equations then
    write `k_t`.""",
    "E208": """A dimension is K, V, a whole number, or a const whose value is a whole number from 1 to
    64. An input is a scalar, [K], [V], [n], [n, K], [n, V] (rows come first), [K, K], [V, V] or [K, V]; a
    gate a scalar, [K], [V], [n] or [K, V]; a state has any two of these axes, one, or none.""",
    "E209": """A subscript counts only at the end of a word, so `k_tv_t` is one name, not `k_t v_t`.
    Products of names need a space or a sign between them.""",
    "E301": """The terms of a sum have one shape. Only a scalar may be added to something else: to a
    square matrix as a multiple of I, to a vector or a [K, V] matrix in every element.""",
    "E302": """In a product of matrices the columns of the left factor are the rows of the right one. A
    vector [K] is a column, so an outer product is `k_t v_tᵀ` and an inner one `k_tᵀ q_t`. All products
    stand on one level and are read from left to right.""",
    "E303": """`*` scales by a scalar. Between two vectors or matrices it could mean two things: write `@`
    (or nothing) for the matrix product and `⊙` for the elementwise one.""",
    "E304": """An elementwise product needs two operands of one shape. To scale the rows of a matrix by a
    vector, multiply by a diagonal matrix: `diag(a_t) S_{t-1}`.""",
    "E305": """A function got arguments of the wrong number or shape. Functions are elementwise on scalars,
    vectors and [K, V] matrices; l2norm, sum, dot and softmax take vectors; diag takes a vector,
    outer two.""",
    "E306": """A quotient needs a scalar below the line, or two operands of one shape; a power needs a
    scalar exponent and a base that is no square matrix.""",
    "E307": """`_{t,j}` picks a row of an [n, K] or [n, V] input, or an entry of an [n] one; rows are
    counted from 1 to n in text, and from 0 in Python. In a loop `for j in 1..m:`, m is at most n.""",
    "E308": """The right-hand side does not have the shape of what is assigned: a state keeps its declared
    shape (if nothing is declared, that of what is added to it, else [K, V]), the output is a column or a
    scalar, a const is a number.""",
    "E309": """I takes its size from the square matrix beside it in a sum or product; here nothing gives
    it one.""",
    "E401": """The state after the update, `S_t`, is used where it is not known yet. The state that its own
    update reads is `S_{t-1}`; whatever uses `S_t`, the update of another state or the output, stands below
    the equation of `S_t`, so no two states may need each other's present.""",
    "E402": """A binding is used above the equation that defines it, or below the loop that it belongs to.
    Equations are read from top to bottom.""",
    "E403": """There is no output. One equation gives `o_t`, or the name that an `output` line declares.""",
    "E404": """There is no state: nothing refers to its own value at the token before.""",
    "E405": """The update uses a matrix state nonlinearly: inside a function, below a fraction line, or
    multiplied by itself or by a state that feeds on it. Such a recurrence has no matrix-product form and can
    only be stepped through; it is refused. Vector and scalar states that a matrix state does not feed may use
    any function, and so may whatever is read from a state into the output or into another state.""",
    "E406": """Inputs, params, consts and dimensions are given from outside; an equation cannot assign
    them.""",
    "E407": """The left-hand side of an equation is a name at the token: `x_t = ...`.""",
    "E408": """A recurrence may read the token and what came before, not what comes after.""",
    "E409": """A const is a number fixed at compile time: its value may use numbers, functions, K, V and
    consts declared above it.""",
    "E410": """A function given to `recurrence` returns a tuple: the new states in the order of its
    parameters, then the output.""",
    "E411": """Each parameter of a function given to `recurrence` after the state has an annotation that
    says what it is, or a default value that makes it a const.""",
    "E412": """The function is run once on symbols to see what it computes. A symbol has no value, so it
    cannot decide an `if`, be turned into a number, be iterated over, or be used by another library.""",
    "E501": """A range that holds no number.""",
    "E502": """A promise that its kind of input cannot keep or already has: `unit` belongs to vectors,
    a range to numbers of its kind.""",
    "E503": """The same kind of property is given twice.""",
    "E902": """A shift goes one token back, `k_{t-1}`, and takes inputs, or bindings made of inputs at the
    token. What depends on a state is carried to the next token as a state of its own. The planner says
    this, too, of a recurrence that still holds shifts: `compile` first makes them inputs.""",
    "E903": """Substeps that are not supported. A loop `for j in 1..n:` counts from 1; its indented body
    holds equations: bindings, then one for the state, in which S_t is the state after the substep before.
    Rows `k_{t,j}` belong to the substep. A loop updates one state and holds no other loop.""",
    # what the planner does not bring to a chunk form
    "E951": """The gate of the state is no product of one gate per axis, or an erase reads the state before
    the gate of the axis that it does not erase: every element, or every column, would need a recurrence of
    its own. Such updates have no chunk form.""",
    "E952": """The state is erased along both axes, or a scalar read from it multiplies a write or another
    vector. Such an update is of low rank on both sides, so that no chunk form exists: it runs token
    after token.""",
    "E953": """A term is neither a product with the state nor an outer product of vectors of the token (in the
    output: a column of the token). It has no chunk form.""",
    "E954": """Coupled states gate each other in a circle. The chunk form of several states needs an order of
    them in which each takes up pasts of later ones only, so that their gate of blocks is triangular;
    rotations, for one, have no such order.""",
    "E955": """The update writes nothing, or it writes or erases along more vectors than chunk kernels
    hold: at most 4 erases and 8 writes per token.""",
    "E957": """The output uses the state in a way that no chunk form has. There, an output is a sum of reads
    `S_tᵀ q_t` (or of reads `S_t p_t`), each perhaps scaled by a scalar or a vector, and of terms without the
    state.""",
    "E958": """A chunk form has matrix states, [K, V] or [V, K]; coupled states have one shape and are at
    most four.""",
    "E959": """Elementwise arithmetic on matrices has a chunk form with outer products only: not where a
    scalar is added to every element of a [K, V] matrix, or where an elementwise product has a factor
    that is no `x yᵀ`.""",
    "E961": """A const has no finite value, or a dimension that it gives is no whole number from 1 to 64.""",
    "E962": """No input or param has one of the state's axes, so no call could say how large it is.""",
    "E970": """States that feed each other are computed in stages, one component after the other, and a
    stage hands on vectors: what is read from its state. Here a stage would have to hand on a whole matrix,
    its states have more than two axes between them, or a vector meets a state that lacks its axis.""",
}


def explain(code: str) -> str:
    """The paragraph for a code, in one line; KeyError if there is no such code."""
    return " ".join(EXPLANATIONS[code.upper()].split())
