"""Digits kept at the nasty ends: float32 within 5e-5 or twice the step loop, and what keeps them."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch

import linalg_dsl
from linalg_dsl import ops
from linalg_dsl.codegen.schedule.kernel_plan import Buffer, is_transform
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner import precision
from linalg_dsl.planner.rounding_floor import operand_error, rounding_floor
from linalg_dsl.templates import torch_library
from linalg_dsl.testing import Extremes, Shape, Subject, make_case
from linalg_dsl.testing.digits import Digits, ends, main, measured
from linalg_dsl.testing.floor import chunk_floor
from linalg_dsl.testing.oracle import exact

ERASED = [
    ("delta_rule", Extremes(values="denormal")),
    ("comba_decayed", Extremes(keys="orthogonal", scalars="high end")),
    ("gated_oja", Extremes(keys="zero")),
    ("eda", Extremes(keys="orthogonal", scalars="one")),
]


def worst(name: str, drawn: Extremes, chunk_size: int | None, backend: str = "torch", T: int = 64) -> Digits:
    op = linalg_dsl.compile(getattr(ops, name).spec, backend=backend, chunk_size=chunk_size)
    subject = Subject.of_op(op, dtypes=(torch.float32,))
    case = make_case(subject, Shape(1, T, 2, 4, 4), dtype=torch.float32, extremes=drawn)
    return max(measured(subject, [case]), key=lambda d: d.part)


@pytest.mark.parametrize("seed", [0, 2, 3, 9])
def test_a_gradient_of_parts_that_cancel_between_stages_keeps_its_digits(seed: int) -> None:
    """Summed over tokens in every stage first, it is off by up to twenty times what is allowed."""
    op = linalg_dsl.compile(ops.rwkv4.spec, backend="torch")
    subject = Subject.of_op(op, dtypes=(torch.float32,))
    drawn = Extremes(values="mixed sizes")
    case = make_case(subject, Shape(1, 130, 1, 16, 8), seed=seed, dtype=torch.float32, extremes=drawn)
    assert max(d.part for d in measured(subject, [case]) if d.tensor == "d w") <= 1


@pytest.mark.parametrize(("name", "drawn"), ERASED)
def test_what_a_chunk_nearly_erases_keeps_its_digits(name: str, drawn: Extremes) -> None:
    """Four channels: with as many tokens as elsewhere it does not."""
    assert worst(name, drawn, None).part <= 1
    assert worst(name, drawn, 64).part > 1


def test_kernels_have_chunks_as_short_as_erases_need_them() -> None:
    drawn = Extremes(keys="orthogonal", scalars="high end")
    assert worst("comba_decayed", drawn, None, "triton", 32).part <= 0.5
    assert worst("comba_decayed", drawn, 16, "triton", 32).part > 0.5


def test_sums_of_a_solve_with_keys_alike_keep_their_digits() -> None:
    """Strengths near 2: as many terms as tokens alternate in sign."""
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(1, 16, generator=generator) + 1e-3 * torch.randn(64, 16, generator=generator)
    key = torch.nn.functional.normalize(key, dim=-1)
    system = (-1.99 * key @ key.T).tril(-1)
    right = torch.randn(64, 8, generator=generator)
    for function, exactly in (("substitute", system), ("substitute_reversed", system.T)):
        solve: Callable[..., torch.Tensor] = getattr(torch_library, function)
        upper = exactly is not system
        want = torch.linalg.solve_triangular(
            -exactly.double(), right.double(), upper=upper, unitriangular=True
        )
        plain = torch.linalg.solve_triangular(-exactly, right, upper=upper, unitriangular=True)

        def error(found: torch.Tensor, want: torch.Tensor = want) -> float:
            return float((found.double() - want).norm() / want.norm())

        assert solve(system, right).dtype == torch.float32
        assert error(solve(system, right)) < 1e-7 < 1e-6 < error(plain)


def test_a_plan_says_what_it_does_for_precision_and_why() -> None:
    plan = linalg_dsl.compile(ops.eda.spec, backend="torch").plan
    assert plan.precision.axis == "K"
    assert plan.precision.shortest == (1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)
    assert plan.precision.transform == "bf16x3"
    lines = plan.explain(B=1, T=64, H=1, K=4, V=8, dtype="float32").schedule
    assert any("2 of them filled: no more erases than channels" in line for line in lines)
    assert any("prep, 32 programs" in line for line in lines)
    assert not any("of them filled" in line for line in plan.explain(B=1, T=64, H=1, K=64, V=8).schedule)
    text = str(plan.explain())
    assert "\nprecision\n" in text
    assert "a chunk has no more erases than channels" in " ".join(text.split())
    assert linalg_dsl.compile(ops.delta_rule.spec).plan.precision.transform == "fp16"
    across = linalg_dsl.compile(ops.gated_oja.spec).plan.precision
    assert (across.axis, across.shortest[:4]) == ("V", (1, 2, 3, 4))
    free = linalg_dsl.compile(ops.gla.spec).plan.precision
    assert free.shortest == ()
    assert any("gradients of gates" in line for line in free.reasons)


@pytest.mark.parametrize(("spread", "strength"), [(1.0, 1.0), (0.1, 1.5), (0.03, 1.9)])
def test_halves_of_bfloat16_form_a_transform_better_than_its_scores_are_known(
    spread: float, strength: float
) -> None:
    """Masked doubling as kernels do it, a product as three of halves, against scores of rounded operands."""
    generator = torch.Generator().manual_seed(0)
    common, noise = (torch.randn(n, 64, generator=generator, dtype=torch.float64) for n in (1, 32))
    keys = torch.nn.functional.normalize(common + spread * noise, dim=-1)
    other = torch.nn.functional.normalize(keys + 0.05 * noise.flip(0), dim=-1)

    def system(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -strength * (x @ y.mT).tril(-1)

    def in_halves(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (ah, al), (bh, bl) = (
            (h := x.bfloat16().float(), (x - h).bfloat16().float()) for x in (a.float(), b.float())
        )
        return al @ bh + ah @ bl + ah @ bh

    def doubled(
        n: torch.Tensor, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        t = torch.arange(32)
        apart = t[:, None] ^ t[None, :]
        x = torch.eye(32, dtype=n.dtype) + torch.where(apart == 1, n, 0.0)
        for level in range(1, 5):
            x = x + product(x, product(torch.where(apart >> level == 1, n, 0.0), x))
        return x

    exact = torch.linalg.inv(torch.eye(32, dtype=torch.float64) - system(other, keys))
    by_halves = doubled(system(other, keys).float(), in_halves).double()
    rounded = torch.linalg.inv(
        torch.eye(32, dtype=torch.float64) - system(other.bfloat16().double(), keys.bfloat16().double())
    )
    assert (doubled(system(other, keys), torch.matmul) - exact).norm() < 1e-9 * exact.norm()
    assert (by_halves - exact).norm() < 0.1 * (rounded - exact).norm()


def test_a_chunk_size_that_was_asked_for_is_kept() -> None:
    asked = linalg_dsl.compile(ops.delta_rule.spec, backend="torch", chunk_size=64)
    free = linalg_dsl.compile(ops.delta_rule.spec, backend="torch")
    assert '"shortest": ("K", ())' in asked.source("forward")
    assert '"shortest": ("K", tuple(range(1,' in free.source("forward")
    text = linalg_dsl.compile(ops.delta_rule.spec, backend="triton").source("forward")
    assert "STEP: tl.constexpr" in text
    assert "STEP" not in linalg_dsl.compile(ops.gla.spec, backend="triton").source("forward")
    assert "STEP" not in linalg_dsl.compile(ops.delta_rule.spec, "triton", 16).source("forward")


@pytest.mark.parametrize("name", ["linear_attention", "simple_gla", "gla", "delta_rule", "kda"])
def test_the_floor_of_a_short_type_follows_from_the_plan(name: str) -> None:
    """Derived, and measured on ordinary numbers: it leaves out only what makes errors smaller."""
    op = linalg_dsl.compile(getattr(ops, name).spec, backend="torch")
    subject = Subject.of_op(op, dtypes=(torch.bfloat16,))
    case = make_case(subject, Shape(1, 128, 2, 64, 64), dtype=torch.bfloat16, seed=1)
    found = chunk_floor(case, exact(case).want)
    derived = rounding_floor(op.plan.forward, op.plan.backward)
    for label, error in found.items():
        result = label.replace("d initial_state", "d_initial S").replace("final state", "final S")
        result = result.replace("d ", "d_")
        assert derived[result] / 4 < error < 1.15 * derived[result] or error < 1e-6, (label, error, derived)


def test_an_operand_is_rounded_by_what_is_derived() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.exp(20 * torch.rand(1 << 16, generator=generator, dtype=torch.float64))
    for kind in ("bfloat16", "float16"):
        scaled = x / x.max() * 1e4 if kind == "float16" else x
        some = scaled[scaled > 1e-3]
        error = (some.to(getattr(torch, kind)).double() - some) / some
        assert float(error.square().mean().sqrt()) == pytest.approx(operand_error(kind), rel=0.02)
    op = linalg_dsl.compile(ops.linear_attention.spec, backend="torch")
    floor = rounding_floor(op.plan.forward, op.plan.backward)
    assert floor["o"] == pytest.approx(2**0.5 * operand_error("bfloat16"))  # the scores, and the output
    assert floor["final S"] == 0  # k and v are inputs, the state is float32


def test_a_certificate_holds_errors_beside_their_yardstick() -> None:
    op = linalg_dsl.compile(ops.delta_rule.spec, backend="torch")
    single = op.check(draws=2, device="cpu", curves=False)
    assert "float32 loop" in str(single)
    assert "precision: " in str(single)
    rows = single.as_dict()["rows"]
    assert all(0 < row["of_bound"] < 1 and 0 < row["yardstick"] < 1e-4 for row in rows)
    assert "floor of" not in str(single)
    short = op.check(draws=2, device="cpu", curves=False, dtype=torch.bfloat16)
    assert "floor of bfloat16, derived from 1.7e-03 an operand" in str(short)
    assert all(row["of_bound"] < 1 for row in short.as_dict()["rows"])
    assert (
        op.check(draws=1, device="cpu", curves=False, dtype=torch.float64).as_dict()["rows"][0]["of_bound"]
        == 0
    )


def test_the_table_of_digits_lists_what_is_beyond_its_bound() -> None:
    out = io.StringIO()
    assert main(["delta_rule", "--sizes", "4", "--length", "128"], out) == 0
    assert "| delta_rule | " in out.getvalue()
    assert "0 results beyond" in out.getvalue()
    out = io.StringIO()
    assert main(["delta_rule", "--sizes", "4", "--length", "128", "--chunk-size", "64"], out) == 1
    assert "final state | values denormal; T 64 K 4 V 2" in out.getvalue()


def test_every_end_is_drawn_by_itself_and_some_together() -> None:
    found = ends(ops.gated_delta_rule.spec)
    assert len(set(found)) == len(found)
    assert {Extremes(), Extremes(gates="resets"), Extremes(keys="nearly identical", scalars="high end")} <= {
        *found
    }
    assert all(e.gates == "mild" for e in ends(ops.delta_rule.spec))


@pytest.mark.parametrize("name", ["delta_rule", "delta_product", "kda", "gated_oja"])
def test_a_wide_solve_keeps_its_triangle_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by default; on, T is float32 in memory and in its products, every part of it, both directions."""
    spec = getattr(ops, name).spec
    usual = linalg_dsl.compile(spec, backend="triton")
    before, parts = usual.source(backend="triton"), {b.name for b in _solved(usual) if b.element == "compute"}
    assert parts
    assert all(f"{part}.to(DOT)" in before for part in parts)
    monkeypatch.setattr(precision, "WIDE_SOLVE", True)
    wide = linalg_dsl.compile(spec, backend="triton")
    text = wide.source(backend="triton")
    assert {b.name for b in _solved(wide) if b.element == "float32"} == parts
    assert not any(f"{part}.to(DOT)" in text for part in parts)
    assert all(f'{part} = call.buffer("ts", False)' in text for part in parts)
    assert (wide.plan.precision.transform, wide.plan.precision.solve) == ("bf16x3", "float32")
    assert any("keep it in float32" in line for line in wide.plan.precision.reasons)
    free = linalg_dsl.compile(ops.gla.spec, backend="triton")
    assert free.plan.precision.solve == "operands"


def test_kernels_with_a_wide_solve_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "WIDE_SOLVE", True)
    report = linalg_dsl.compile(ops.delta_product.spec, backend="triton").check(B=1, T=20, H=1, K=3, V=4)
    assert report.ok, str(report)


def _solved(op: CompiledOp) -> list[Buffer]:
    kernels = op.plan.kernels
    return [b for b in kernels.buffers if is_transform(kernels.plan.nodes, b.node)]
