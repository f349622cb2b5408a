"""Step classes through the public face: notice, strict, explanation, checks, files, torch.compile."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from step_cases import COUNT, DENSE, TEXTS, TWO_SIDED, UNDECAYED_ERASE
from torch import Tensor

import linalg_dsl as ld
from linalg_dsl import driver
from linalg_dsl.errors import ArgumentError
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.op import CompiledOp
from linalg_dsl.planner.step_form import StepForm

ALONE = """
import sys, torch
folder = sys.argv[1]
sys.path.insert(0, folder)
import mine
x = [t.requires_grad_() for t in torch.load(folder + "/x.pt")]
o = mine.undecayed_erase(*x)
o.sum().backward()
assert "linalg_dsl" not in sys.modules
torch.save([o.detach(), *(t.grad for t in x)], folder + "/y.pt")
"""


@pytest.fixture(autouse=True)
def forget_notices() -> None:
    driver._NOTED.clear()


def quiet(text: str, **options: object) -> CompiledOp:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ld.compile(text, **options)  # type: ignore[arg-type]


def test_a_slower_path_is_said_once_with_the_reason_at_the_users_line() -> None:
    with pytest.warns(
        UserWarning, match="two_sided has no chunk form and is computed token after token: "
    ) as seen:
        ld.compile(TWO_SIDED, backend="torch")
    assert [Path(w.filename).name for w in seen] == ["test_step_op.py"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ld.compile(TWO_SIDED, backend="torch", chunk_size=4)


def test_strict_makes_it_an_error_that_says_why() -> None:
    with pytest.raises(ArgumentError, match=r"two_sided has no chunk form .*; strict=True forbids that"):
        ld.compile(TWO_SIDED, strict=True)


def test_a_scan_is_what_its_class_promises() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        form = ld.compile(TEXTS["mamba1"], strict=True).artefacts().form
    assert isinstance(form, StepForm)
    assert form.name == "scan"


@pytest.mark.parametrize(
    "name", ["two_sided", "undecayed_erase", "dense", "mamba1", "hgrn", "rg_lru", "count"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_check_passes_with_torch(name: str, dtype: torch.dtype) -> None:
    op = quiet(TEXTS[name], backend="torch", chunk_size=4)
    assert op.check(T=9, K=4, V=6, dtype=dtype, cu_seqlens=[0, 0, 4, 9]).ok
    report = op.check(T=9, K=4, V=6, dtype=dtype)
    assert report.ok, report


@pytest.mark.parametrize("name", ["undecayed_erase", "longhorn"])
def test_the_check_passes_with_triton(name: str) -> None:
    report = quiet(TEXTS[name], backend="triton").check(B=1, T=5, H=2, K=4, V=6)
    assert report.ok, report


def test_the_explanation_says_class_reason_equations_costs_and_schedule() -> None:
    text = str(quiet(TWO_SIDED).plan.explain(B=2, T=100, H=4, K=64, V=64))
    for part in (
        "two_sided: sequential",
        "no chunk form",
        "S_t = H₁ − u ∘ c ∘ Σ_V(H₁ ∘ u) + k ∘ v",
        "dS_{t-1} = ",
        "per token and head, K = 64, V = 64",
        "for B = 2, T = 100, H = 4: 100 steps one after the other",
        "one program per sequence and head: no axis of the states can be split",
    ):
        assert part in text
    assert "align*" in quiet(TWO_SIDED).plan.to_latex()


def test_several_states_are_a_named_tuple() -> None:
    op = quiet(COUNT, backend="torch")
    tensors = draw(op.spec, 1, 4, 2, 3, 1)
    o, state = op(*tensors.values(), output_final_state=True)
    assert (state.c.shape, state.h.shape) == ((1, 2), (1, 2, 3))
    again, _ = op(*(x[:, 2:] for x in tensors.values()), output_final_state=True, initial_state=op(
        *(x[:, :2] for x in tensors.values()), output_final_state=True)[1])  # fmt: skip
    assert torch.allclose(o[:, 2:], again)


def test_gradients_pass_gradcheck() -> None:
    op = quiet(DENSE, backend="torch", chunk_size=2)
    given = [x.requires_grad_() for x in draw(op.spec, 1, 3, 1, 2, 2).values()]
    assert torch.autograd.gradcheck(lambda *x: op(*x, output_final_state=True), given)


def test_torch_compile_sees_one_operator() -> None:
    op = quiet(UNDECAYED_ERASE, backend="torch")
    given = [x.requires_grad_() for x in draw(op.spec, 1, 5, 2, 3, 4, dtype=torch.float32).values()]

    def loss(*x: Tensor) -> Tensor:
        o: Tensor = op(*x)
        return o.square().sum()

    eager = torch.autograd.grad(loss(*given), given)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*given), given)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_exported_file_stands_alone(backend: str, tmp_path: Path) -> None:
    op = quiet(UNDECAYED_ERASE, backend=backend)
    path = op.export(tmp_path / "mine.py", backend=backend)
    assert "linalg_dsl." not in path.read_text().replace("linalg_dsl {", "")
    tensors = draw(op.spec, 1, 4, 1, 3, 4, dtype=torch.float32)
    torch.save(list(tensors.values()), tmp_path / "x.pt")
    subprocess.run([sys.executable, "-c", ALONE, str(tmp_path)], check=True)
    given = [x.requires_grad_() for x in tensors.values()]
    o = op(*given)
    o.sum().backward()
    found = torch.load(tmp_path / "y.pt")
    assert all(torch.equal(a, b) for a, b in zip(found, [o.detach(), *(x.grad for x in given)], strict=True))
