"""What the text of gradient kernels with a decay per channel owes to registers."""

from __future__ import annotations

import re

import pytest

import linalg_dsl as ld
from linalg_dsl.ops.catalogue import catalogue_text

NAMES = ("gla", "kda", "dplr", "gdn2", "rwkv6", "hgrn2")


def gradients(name: str) -> str:
    text = ld.compile(catalogue_text(name)).source("backward", backend="triton")
    return text[text.index(f"def {name}_bwd_gradients(") :].split("\n\n\n")[0]


@pytest.mark.parametrize("name", NAMES)
def test_cotangents_are_one_operand_for_rows_and_columns(name: str) -> None:
    """Where one anchor serves the chunk no mask is left to apply, and no tile is turned in registers."""
    text = gradients(name)
    before, inside = text.split("for i_k in ")
    assert "tl.trans(b_d_g" not in before
    near = inside.split("        else:\n")[1].split("\n        b_dw")[0]
    assert "tl.where" not in near
    for cotangents in set(re.findall(r"b_cotangents_\d", before)):
        assert f"tl.trans({cotangents})," in near
        assert f", {cotangents}," in near


@pytest.mark.parametrize("name", NAMES)
def test_sums_behind_each_token_are_one(name: str) -> None:
    """What walks and scores leave to be summed from each token on is added up first."""
    text = gradients(name)
    sums = re.findall(r"token_sums\((\w+), tokens_within\(C, AFTER=True, STRICT=\w+\)", text)
    assert [x for x in sums if x != "b_log2_gate"] == ["b_behind"]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_gradients_keep_nothing_that_each_can_form(name: str) -> None:
    """Where registers are short: with several scores, or rows of the shorter interval."""
    found = re.findall(r"for i_k in (.*):", gradients(name))
    fits = name in ("gla", "hgrn2")
    assert found == ["range(K_BLOCKS)" if fits else "tl.range(K_BLOCKS, disable_licm=True)"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_added_to_zero(name: str) -> None:
    assert not re.search(r"= b_\w+ \+ 0\.0$", gradients(name), re.MULTILINE)


@pytest.mark.parametrize("name", ["gla", "kda", "dplr"])
def test_derivatives_of_decays_take_the_products_that_others_are(name: str) -> None:
    """A walk's derivative is used once: multiplied by its decay, for what was decayed and for the decay."""
    text = gradients(name)
    for derivative in set(re.findall(r"(b_d_\w+_(?:until_end|since_start|to_previous)) = tl\.load", text)):
        assert len(re.findall(rf"\b{derivative}\b", text)) == 2
