"""The grammar of layer patterns: what it means, and what its mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

import linalg_dsl as ld
from linalg_dsl.errors import ArgumentError


def names(pattern: str, layers: int | None = None) -> str:
    return " ".join(str(c) for c in ld.nn.parse_pattern(pattern, layers))


@pytest.mark.parametrize(
    ("pattern", "layers", "meaning"),
    [
        ("delta", None, "delta"),
        ("delta*3 full", None, "delta delta delta full"),
        ("delta*3 full", 6, "delta delta delta full delta delta"),
        ("delta*3 window(512) full@2,mid", 8, "delta delta full window(512) full delta delta window(512)"),
        ("delta*3 window(512) full@2,mid", None, "delta delta full window(512)"),
        ("gla full@first,last", 4, "full gla gla full"),
        ("gla full@-2", 4, "gla gla full gla"),
        ("gla full@1 gdn@0,-1", 4, "gdn full gla gdn"),
        ("full@0,1", 2, "full full"),
        ("window( 8, heads = 2 ) gsa(m=16, conv=0)", None, "window(8, heads=2) gsa(conv=0, m=16)"),
        ("  delta   gla  ", None, "delta gla"),
    ],
)
def test_patterns_mean_layers(pattern: str, layers: int | None, meaning: str) -> None:
    assert names(pattern, layers) == meaning


def test_names_are_of_layers_catalogue_short_names_and_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.rec"
    file.write_text(str(ld.ops.kda.spec), encoding="utf-8")
    found = ld.nn.parse_pattern(f"delta gdn rwkv7 {file} gla", layers={"gla": ld.ops.retnet})
    wanted = [ld.ops.delta_rule, ld.ops.gated_delta_rule, ld.ops.rwkv7, ld.ops.kda, ld.ops.retnet]
    assert [c.spec for c in found] == [w.spec for w in wanted]  # a name of layers comes first


@pytest.mark.parametrize(
    ("pattern", "layers", "message"),
    [
        ("", None, "pattern must be a text such as"),
        ("delta*0", None, "a count is a whole number from 1, got '0'"),
        ("delta*x", None, "a count is a whole number from 1, got 'x'"),
        ("delta*2@1", None, "has a count and places"),
        ("delta full@9", 4, "there is no layer 9; layers are 0 to 3"),
        ("delta full@-5", 4, "there is no layer -5"),
        ("delta full@middle", 4, "a place is a number, first, mid, last; got 'middle'"),
        ("delta full@1 gla@1", 4, "'full@1' and 'gla@1' both take layer 1"),
        ("full@0", 2, "nothing says what layer 1 is"),
        ("full@0", None, "no item without places, so num_layers must be given"),
        ("delta", 0, "num_layers must be from 1 to 1024, got 0"),
        ("window", None, "window takes its size in tokens, such as window\\(512\\)"),
        ("window(0)", None, "window takes its size"),
        ("window(2.5)", None, "window takes its size"),
        ("delta(3)", None, "delta takes arguments by name only, got 3"),
        ("delta(n=3)", None, "delta has no argument 'n'; it takes conv, head_dim, heads, scale, value_dim"),
        ("full(value_dim=3)", None, "full has no argument 'value_dim'"),
        ("full(heads=1.5)", None, "heads is a whole number, got 1.5"),
        ("full(heads=x)", None, "an argument is a number, got 'x'"),
        ("full(heads=inf)", None, "an argument is a number, got 'inf'"),
        ("full(heads=1, heads=2)", None, "heads is given twice"),
        ("full()", None, "an empty argument"),
        ("full(", None, "brackets do not match"),
        ("full)x(", None, "cannot read"),
        ("detla_rule", None, "there is no layer 'detla_rule'; did you mean delta_rule?"),
        ("nothing_like_it_at_all", None, "names are full, window, the catalogue's"),
        ("no/such.rec", None, "there is no file no/such.rec"),
    ],
)
def test_mistakes_say_what_was_expected(pattern: str, layers: int | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ld.nn.parse_pattern(pattern, layers)
