"""Edits of a spec give the spec that one would have written."""

from __future__ import annotations

import pytest

import linalg_dsl as ld
from linalg_dsl.errors import ArgumentError, DslError
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.study.variants import edit, parse_vary, variants


def named(spec: RecurrenceSpec, name: str) -> RecurrenceSpec:
    return ld.parse(str(spec).replace(f"recurrence {spec.name}", f"recurrence {name}"))


def entry(name: str) -> RecurrenceSpec:
    return getattr(ld.ops, name).spec  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("base", "name", "alternative", "wanted"),
    [
        ("gated_delta_rule", "gate", "[K]", "kda"),
        ("kda", "gate", "scalar", "gated_delta_rule"),
        ("gla", "gate", "scalar", "simple_gla"),
        ("gla", "gate", "none", "linear_attention"),
        ("simple_gla", "gate", "[K]", "gla"),
        ("simple_gla", "gate", "gate in (-1, 1)", None),
        ("kda", "gate", "none", "delta_rule"),
        ("delta_product", "rank", "2", "delta_product"),
        ("delta_rule", "rank", "1", "delta_rule"),
    ],
)
def test_edits_lead_from_one_entry_of_the_catalogue_to_another(
    base: str, name: str, alternative: str, wanted: str | None
) -> None:
    found = edit(entry(base), name, alternative)
    if wanted is not None:
        assert found == named(entry(wanted), base)
    else:
        assert found.input("g").kind == "gate"


@pytest.mark.parametrize(
    ("base", "name", "alternative", "lines", "declared"),
    [
        (
            "delta_rule", "gate", "sigmoid(a_t)^(1/16)",
            ["gate_t = sigmoid(a_t)^(1/16)", "S_t = (I - beta_t k_t k_tᵀ) gate_t S_{t-1} + beta_t k_t v_tᵀ"],
            "input a    : scalar",
        ),
        (
            "comba", "gate", "[K] exp(-softplus(a_t))",
            ["gate_t = exp(-softplus(a_t))",
             "S_t = diag(gate_t) S_{t-1} - beta_t k_t p_tᵀ S_{t-1} + beta_t k_t v_tᵀ"],
            "input a    : [K]",
        ),
        ("linear_attention", "gate", "[V]", ["gate_t = exp(g_t)", "S_t = S_{t-1} diag(gate_t) + k_t v_tᵀ"],
         "input g : log gate [V]"),
        ("q_delta", "gate", "[K]",
         ["gate_t = exp(g_t)",
          "S_t = diag(gate_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}ᵀ diag(gate_t) (k_t + lam q_t))ᵀ"],
         "input g    : log gate [K]"),
        ("retnet", "gamma", "sigmoid(a_t)", ["gamma_t = sigmoid(a_t)", "S_t = gamma_t S_{t-1} + k_t v_tᵀ"],
         "input a : scalar"),
        ("delta_rule", "beta", "scalar in (0, 1)", [], "input beta : scalar in (0, 1)"),
        ("delta_rule", "beta", "sigmoid(beta_t)",
         ["beta_t = sigmoid(beta_raw_t)"], "input beta_raw : scalar"),
        ("gla", "scale", "1/K", [], "const scale = 1 / K"),
        ("simple_gla", "o", "scale S_{t-1}ᵀ q_t", ["o_t = scale S_{t-1}ᵀ q_t"], "input g : log gate"),
    ],
)  # fmt: skip
def test_edits_write_what_they_say(
    base: str, name: str, alternative: str, lines: list[str], declared: str
) -> None:
    spec = edit(entry(base), name, alternative)
    head = [
        "recurrence x",
        *[f"{i}" for i in str(spec).splitlines() if i.startswith(("input", "const", "param"))],
    ]
    assert declared in head
    reread = ld.parse(str(spec))
    assert reread == spec
    # the same equations written by hand
    output = f"{spec.outputs[0].target}_t = "
    rest = [x for x in str(entry(base)).splitlines() if x.startswith(("S_t", output))]
    kept = [x for x in rest if x.split(" = ")[0] not in {y.split(" = ")[0] for y in lines}]
    body_lines = [
        *(x for x in lines if not x.startswith(output)),
        *kept,
        *(x for x in lines if x.startswith(output)),
    ]
    if lines:
        by_hand = ld.parse("\n".join([*head, *body_lines]))
        assert named(by_hand, spec.name) == spec


def test_a_higher_rank_runs_the_update_on_rows_with_a_root_of_the_gate() -> None:
    found = edit(entry("gated_delta_rule"), "rank", "2")
    assert found.input("k").dims == (2, "K")
    assert found.input("beta").dims == (2,)
    assert found.input("g").dims == found.input("q").dims[:0]
    text = """
recurrence gated_delta_rule
input q : [K]
input k : [2, K] unit
input v : [2, V]
input g : log gate
input beta : [2] in (0, 2)
const scale = 1 / sqrt(K)
for j in 1..2:
    S_t = exp(g_t / 2) (I - beta_{t,j} k_{t,j} k_{t,j}ᵀ) S_t + beta_{t,j} k_{t,j} v_{t,j}ᵀ
o_t = scale S_tᵀ q_t
"""
    assert found == ld.parse(text)
    assert (
        edit(entry("delta_product"), "rank", "3").consts[0].value
        == ld.parse("""
recurrence c
const n = 3
input q, k : [K]
input v : [V]
S_t = S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t""")
        .consts[0]
        .value
    )


def test_edits_are_combined_and_labelled() -> None:
    edits = [parse_vary("gate: none, [K], max(a_t, 0)"), parse_vary("rank: 1..2")]
    found = variants(entry("delta_rule"), edits)
    assert [v.label for v in found] == [
        f"gate: {g}; rank: {r}" for g in ("none", "[K]", "max(a_t, 0)") for r in (1, 2)
    ]
    assert len({str(v.spec) for v in found}) == 6
    assert [v.label for v in variants(entry("gla"), [])] == ["gla"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scalar, [K]", "expected 'NAME: alternative, alternative', got"),
        ("gate:", "an alternative is empty"),
        ("gate: a,, b", "an alternative is empty"),
        ("rank: 3..1", "3..1 is no range"),
        ("rank: 1..900", "is no range of 1 to 64 numbers"),
    ],
)
def test_edits_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_vary(text)


@pytest.mark.parametrize(
    ("base", "name", "alternative", "error", "message"),
    [
        (
            "gla",
            "decay",
            "scalar",
            ArgumentError,
            "gla has no 'decay'; it has q, k, v, g, scale, S, o, gate, rank",
        ),
        ("gla", "rank", "x", ArgumentError, "a number from 1 to 16, got 'x'"),
        ("rwkv6", "rank", "2", ArgumentError, "k is read outside the update"),
        ("hgrn2", "gate", "scalar", ArgumentError, "does not fit: cannot add"),
        ("hgrn", "gate", "scalar", ArgumentError, "hgrn has no matrix state"),
        ("mdn", "rank", "2", ArgumentError, "has not one matrix state"),
        ("gla", "gate", "sigmoid(a_t", DslError, "E102"),
        ("gla", "gate", "tanh(S_{t-1})", DslError, "E"),
        ("gla", "k", "scalar", DslError, "E301"),
    ],
)
def test_edits_that_make_no_spec(
    base: str, name: str, alternative: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        edit(entry(base), name, alternative)
    noted = []
    variants(entry(base), [parse_vary(f"{name}: {alternative}")], lambda v, e: noted.append((v.label, e)))
    assert [label for label, _ in noted] == [f"{name}: {alternative}"]


def test_too_many_or_doubled_edits_are_refused() -> None:
    many = [parse_vary(f"{n}: 1..30") for n in ("scale", "rank")]
    with pytest.raises(ArgumentError, match="900 combinations; at most 500"):
        variants(entry("delta_rule"), many)
    with pytest.raises(ArgumentError, match="every name once"):
        variants(entry("delta_rule"), [many[0], many[0]])
