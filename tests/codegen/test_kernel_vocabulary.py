"""Generated kernels keep to what every Triton from 3.4 on has, without atomics, host calls or own hints."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from runtime_cases import OWN, op_of

LANGUAGE = {
    "PropagateNan", "abs", "arange", "associative_scan", "bfloat16", "broadcast_to", "constexpr", "cumsum",
    "debug_barrier", "dot", "exp", "exp2", "expand_dims", "float16", "float32", "float64", "full", "int1",
    "int32", "int64", "join", "load", "log", "max", "maximum", "min", "minimum", "multiple_of",
    "num_programs", "program_id", "range", "reshape", "rsqrt", "sigmoid", "split", "sqrt", "static_range",
    "store", "sum", "trans", "uint32", "where", "zeros", "zeros_like",
}  # fmt: skip
"""1005, 1062, 1106: block pointers were removed, host functions in kernels refused; 145460 (pytorch): atomics
make gradients differ from run to run."""
NAMES = (
    "linear_attention",
    "gla",
    "kda",
    "gated_oja",
    "dfw",
    "mdn",
    "mlstm",
    "lstm",
    "hgrn",
    "gsa",
    "dplr",
    *OWN,
)


def kernels(text: str) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and any(
            "triton.jit" in ast.unparse(d) for d in node.decorator_list
        ):
            yield node


def strangers(text: str) -> set[str]:
    """What kernels call or read that is neither Triton's of all versions nor a kernel of this module."""
    own = {f.name for f in kernels(text)}
    found = set()
    for kernel in kernels(text):
        for node in (n for statement in kernel.body for n in ast.walk(statement)):
            match node:
                case ast.Attribute(value=ast.Name(id="tl"), attr=name) if name not in LANGUAGE:
                    found.add(f"tl.{name}")
                case ast.Call(func=ast.Name(id=name)) if name not in own | {"range", "float"}:
                    found.add(name)
                case ast.Call(func=ast.Attribute(value=value, attr=name)):
                    # tensor descriptors, made on the host, have been there since 3.4
                    described = name == "load" and ast.unparse(value).startswith("tile_")
                    if ast.unparse(value) != "tl" and name != "to" and not described:
                        found.add(ast.unparse(node.func))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_kernels_use_what_every_version_has(name: str) -> None:
    op = op_of(name)
    texts = [op.source("step", "triton"), op.source(backend="triton")]
    assert [strangers(t) for t in texts] == [set(), set()]
    assert all(list(kernels(t)) for t in texts)


def test_a_stranger_is_seen() -> None:
    head = "@triton.jit\ndef f(p):\n    "
    for line, name in (
        ("x = tl.make_block_ptr(p)", "tl.make_block_ptr"),
        ("tl.atomic_add(p, 1)", "tl.atomic_add"),
        ("x = next_power(3)", "next_power"),
        ("x = p.item()", "p.item"),
    ):
        assert strangers(head + line) == {name}
