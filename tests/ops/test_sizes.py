"""Sizes at their ends: no tokens, no batch, widths from 1 to 512, and offsets that are 64 bits wide."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from runtime_cases import CLASSES, call, inputs_of, op_of, with_gradients, worst

from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.op import CompiledOp

LARGE = {"i_ch", "i_n", "i_nh", "i_c", "i_first", "first_mark", "first_chunk", "start", "begin", "i_group"}
"""Indices that grow with the number of tokens, sequences or chunks."""
TABLES = {"seq_start", "chunk_start"}


class Widths(ast.NodeVisitor):
    """Which names of a kernel hold 64-bit integers, and products that may pass 2^31 in 32 bits."""

    def __init__(self) -> None:
        self.wide: set[str] = set()
        self.narrow: list[str] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                (self.wide.add if self.is_wide(node.value) else self.wide.discard)(target.id)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name) and self.is_wide(node.value):
            self.wide.add(node.target.id)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mult) or self.is_wide(node):
            return
        names = factors(node)
        if names & LARGE and names & {"H", "K", "V", "KP", "VP", "BLOCKS", "BLOCK"}:
            self.narrow.append(ast.unparse(node))

    def is_wide(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.wide
            case ast.BinOp(left=left, right=right):
                return self.is_wide(left) or self.is_wide(right)
            case ast.Subscript(value=value):
                return self.is_wide(value)
            case ast.Call(func=ast.Attribute(attr="to"), args=[kind, *_]):
                return ast.unparse(kind) == "tl.int64"
            case ast.Call(func=ast.Attribute(attr="load"), args=[place, *_]):
                return any(isinstance(n, ast.Name) and n.id in TABLES for n in ast.walk(place))
            case _:
                return False


def factors(node: ast.expr) -> set[str]:
    """The names that an index is computed from; what a call gives is none of them."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.BinOp(left=left, right=right):
            return factors(left) | factors(right)
        case ast.Subscript(value=value):
            return factors(value)
        case _:
            return set()


def kernels(text: str) -> list[ast.FunctionDef]:
    """The functions that are launched: those that know which program they are."""
    found = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.decorator_list]
    return [f for f in found if "program_id" in ast.unparse(f)]


def narrow_products(text: str) -> list[str]:
    found = []
    for kernel in kernels(text):
        widths = Widths()
        for statement in kernel.body:
            widths.visit(statement)
        found += widths.narrow
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_offsets_are_64_bits_wide_and_grids_have_one_axis(name: str) -> None:
    """Axis 0 of a grid takes 2^31 - 1 programs; the others take 65535, and none is used."""
    for module in op_of(name, backend="triton").modules("triton"):
        assert narrow_products(module.text) == []
        assert len(kernels(module.text)) >= 2
        assert set(re.findall(r"tl\.program_id\((\d)\)", module.text)) == {"0"}
        assert "kernel[(programs,)](" in module.text
        narrowed = re.sub(r"\.to\(tl\.int64\)", ".to(tl.int32)", module.text)
        assert narrow_products(narrowed), "the test sees nothing"


def empty_call(op: CompiledOp, B: int, T: int) -> None:
    tensors, states = inputs_of(op, B, T, 2, 4, 3)
    results, grads = with_gradients(op, tensors, states, None)
    assert results[0].shape[:3] == (B, T, 2)
    assert [g.shape for g in grads] == [x.shape for x in (*tensors, *states)]
    assert all(torch.equal(r, s) for r, s in zip(results[1:], states, strict=True))
    assert all(g.isfinite().all() for g in grads)
    for g, d in zip(grads, op.spec.inputs, strict=False):
        assert d.timed or not g.any()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", CLASSES)
def test_nothing_in_and_nothing_out(name: str, backend: str) -> None:
    op = op_of(name, backend=backend, chunk_size=16)
    for B, T in ((2, 0), (0, 5), (0, 0)):
        empty_call(op, B, T)
    tensors, states = inputs_of(op, 1, 0, 2, 4, 3, N=3)
    offsets = torch.zeros(4, dtype=torch.int32)
    results = call(op, tensors, states, cu_seqlens=offsets)
    assert all(torch.equal(r, s) for r, s in zip(results[1:], states, strict=True))
    tensors, states = inputs_of(op, 1, 0, 2, 4, 3, N=0)
    assert call(op, tensors, states, cu_seqlens=offsets[:1])[1].shape[0] == 0


@pytest.mark.parametrize(
    ("name", "K", "V"),
    [
        *(("gated_delta_rule", *s) for s in ((1, 1), (1, 512), (512, 1))),
        ("value_erase", 1, 1),
        ("value_erase", 3, 17),
        ("own_scan", 1, 1),
        ("own_scan", 1, 512),
    ],
)
def test_kernels_take_widths_from_1_to_512(name: str, K: int, V: int) -> None:
    op = op_of(name, backend="triton", chunk_size=16)
    tensors, states = inputs_of(op, 1, 3, 1, K, V)
    results, grads = with_gradients(op, tensors, states)
    wanted, d_wanted = with_gradients(op.reference, tensors, states)
    assert worst([*results, *grads], [*wanted, *d_wanted]) < 1e-4


@pytest.mark.parametrize("name", ["gla", "own_scan"])
def test_more_programs_than_a_grid_has_are_refused(name: str) -> None:
    op = op_of(name, backend="triton")
    for B, T, H in ((2**24, 1, 128), (1, 2**31, 16)):
        tensors = [
            x.expand(B, T, H, *x.shape[3:]) if d.timed else x.expand(H, *x.shape[1:])
            for x, d in zip(inputs_of(op, 1, 1, 1, 4, 4)[0], op.spec.inputs, strict=True)
        ]
        with pytest.raises(ArgumentError, match=f"{name}: {B} sequences of {H} heads .* split the batch"):
            op(*tensors)


@pytest.mark.parametrize("name", CLASSES)
def test_torch_modules_take_any_width(name: str) -> None:
    op = op_of(name, backend="torch")
    for K, V in ((1, 1), (1, 40), (40, 1), (33, 65)):
        tensors, states = inputs_of(op, 1, 3, 1, K, V, dtype=torch.float64)
        results, grads = with_gradients(op, tensors, states)
        wanted, d_wanted = with_gradients(op.reference, tensors, states)
        assert worst([*results, *grads], [*wanted, *d_wanted]) < 1e-9
