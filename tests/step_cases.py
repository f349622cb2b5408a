"""Recurrences of the step classes, and a module's every result against the float64 step loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from kernel_cases import embedded, relative
from torch import Tensor

from linalg_dsl.codegen.cache import load_module
from linalg_dsl.codegen.emit.names import ascii_identifier
from linalg_dsl.codegen.emit.torch_step import emit_torch_step
from linalg_dsl.codegen.emit.triton_step import emit_triton_step
from linalg_dsl.language.parser import parse
from linalg_dsl.language.spec import RecurrenceSpec
from linalg_dsl.ops.args import const_numbers
from linalg_dsl.ops.catalogue import catalogue_text
from linalg_dsl.ops.draw import GateKind, draw, draw_state
from linalg_dsl.ops.reference import reference
from linalg_dsl.planner.step_form import StepForm, step_form
from linalg_dsl.planner.step_plan import step_backward

TWO_SIDED = """
recurrence two_sided
input q, k : [K] unit
input v, u : [V] unit
input b, c : scalar in (0, 2)
S_t = (I - b_t k_t k_tᵀ) S_{t-1} (I - c_t u_t u_tᵀ) + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
UNDECAYED_ERASE = """
recurrence undecayed_erase
input q : [K]
input k : [K] unit
input v : [V]
input g : log gate [V]
input b : scalar in (0, 2)
param D : [V]
S_t = S_{t-1} diag(exp(g_t)) - b_t k_t (k_tᵀ S_{t-1}) + b_t k_t v_tᵀ
o_t = S_tᵀ q_t + D ⊙ v_t
"""
DENSE = """
recurrence dense
input q, k : [K]
input v : [V]
input M : [K, K]
S_t = M_t S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
DENSE_BOTH = """
recurrence dense_both
input q, k : [K]
input v : [V]
input M : [K, K]
input N : [V, V]
input g : log gate
S_t = M_tᵀ (exp(g_t) S_{t-1}) N_t + k_t v_tᵀ
o_t = S_{t-1}ᵀ q_t
"""
DENSE_SCALED = """
recurrence dense_scaled
input q, k : [K]
input v : [V]
input M : [K, K]
S_t = (I - M_t ⊙ (k_t k_tᵀ)) S_{t-1} + k_t v_tᵀ
o_t = S_tᵀ q_t
"""
OJA_WITH_SKIP = """
recurrence oja_with_skip
input q, k : [K]
input v : [V] unit
input b : scalar in (0, 1)
param D : [V]
const scale = 1 / sqrt(K)
state S : [V, K]
S_t = (I - b_t v_t v_tᵀ) S_{t-1} + b_t v_t k_tᵀ
o_t = scale S_t q_t + D ⊙ v_t
"""
ROWS = """
recurrence rows
input q : [K]
input k : [3, K]
input v : [3, V]
input b : [3] in (0, 1)
input g : log gate [K, V]
S_t = exp(g_t) ⊙ S_{t-1} + k_tᵀ diag(b_t) v_t + k_{t,2} v_{t,1}ᵀ
o_t = S_tᵀ q_t
"""
SLOTS = """
recurrence slots
input q, k : [K]
input v : [V]
input a : log gate
const m = 3
state A : [m, K]
state S : [m, V]
param w : [m]
A_t = exp(a_t) A_{t-1} + w k_tᵀ
S_t = exp(a_t) S_{t-1} + softmax(A_t k_t) v_tᵀ
o_t = S_tᵀ softmax(A_t q_t)
"""
COUNT = """
recurrence count
input x : [K]
input g : log gate
state c : scalar
state h : [K]
c_t = exp(g_t) c_{t-1} + sum(x_t)
h_t = exp(g_t) h_{t-1} + c_{t-1} x_t
o_t = h_t / sqrt(1 + c_t^2)
"""
SWAPPED = """
recurrence swapped
input q, k : [K]
input v : [V]
input b : scalar in (0, 1)
state S : [K, V]
state P : [K, V]
S_t = P_{t-1}
P_t = b_t S_{t-1} + k_t v_tᵀ
o_t = (S_t + P_t)ᵀ q_t
"""
SUBSTEPS = """
recurrence substeps
input q : [K]
input k : [2, K] unit
input u : [V] unit
input v : [2, V]
input b : [2] in (0, 1)
const n = 2
S_t = S_{t-1} (I - u_t u_tᵀ)
for j in 1..n:
    S_t = S_t - b_{t,j} k_{t,j} (k_{t,j}ᵀ S_t - v_{t,j}ᵀ)
o_t = S_tᵀ q_t
"""
TEXTS: Mapping[str, str] = {
    "two_sided": TWO_SIDED, "undecayed_erase": UNDECAYED_ERASE, "dense": DENSE, "dense_both": DENSE_BOTH,
    "dense_scaled": DENSE_SCALED, "oja_with_skip": OJA_WITH_SKIP, "rows": ROWS, "slots": SLOTS,
    "count": COUNT, "swapped": SWAPPED, "substeps": SUBSTEPS,
    **{n: catalogue_text(n) for n in (
        "mamba1", "longhorn", "hgrn", "rg_lru", "rwkv4", "mlstm", "mdn", "s5", "gateloop",
        "normalised_linear_attention",
    )},
}  # fmt: skip
PACKED = [0, 0, 4, 5, 5, 9, 9]


@dataclass(frozen=True)
class StepCase:
    """A recurrence with its plans, whatever class the compiler would choose."""

    form: StepForm

    @property
    def spec(self) -> RecurrenceSpec:
        return self.form.spec

    def module(self, backend: str, chunk_size: int | None = None) -> ModuleType:
        emit = emit_torch_step if backend == "torch" else emit_triton_step
        plans = (self.form, self.form.plan, step_backward(self.form.plan))
        return load_module(
            f"{ascii_identifier(self.spec.name)}_{backend}", emit(*plans, chunk_size=chunk_size)
        )


def case(name: str) -> StepCase:
    return StepCase(step_form(parse(TEXTS[name])))


def errors(
    found: StepCase,
    module: ModuleType,
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float64,
    offsets: Sequence[int] | None = None,
    heads: Mapping[str, int] | None = None,
    initial: bool = True,
    gates: GateKind = "mild",
) -> dict[str, float]:
    """Relative error of the output, the final states and every gradient; inputs lie between NaNs."""
    spec = found.spec
    tensors = {n: x.to(dtype) for n, x in draw(spec, B, T, H, K, V, heads=heads, gates=gates, seed=4).items()}
    count = B if offsets is None else len(offsets) - 1
    cu = None if offsets is None else torch.tensor(offsets)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    states = [x.to(work) for x in draw_state(spec, count, H, K, V, seed=4)] if initial else []
    exact = {n: x.double().requires_grad_() for n, x in tensors.items()}
    before = [x.double().requires_grad_() for x in states]
    o, last = reference(
        spec, exact, initial_state=before or None, output_final_state=True, cu_seqlens=cu, dtype=torch.float64
    )
    wanted = (o, *(last if isinstance(last, tuple) else (last,)))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in wanted]
    loss = sum((w * x).sum() for w, x in zip(weights, wanted, strict=True))
    assert isinstance(loss, Tensor)
    leaves = [*exact.values(), *before]
    grads: list[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:  # not without tokens and states
        grads = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    sizes = {"K": K, "V": V}
    values = {**{n: float(x) for n, x in sizes.items()}, **const_numbers(spec, sizes, {})}
    firsts = tuple(embedded(x.detach()) for x in states) if initial else (None,) * len(spec.states)
    given = (
        tuple(embedded(x.detach()) for x in tensors.values()),
        firsts,
        tuple(values[c] for c in module.CONSTS),
        cu,
    )
    got, finals, residuals = module.forward(*given, True, True)
    d_o, *d_finals = (w.to(work) for w in weights)
    gradients, d_firsts = module.backward(*given, residuals, d_o.to(got.dtype), d_finals)
    names = ["o", *(s.name for s in spec.states)]
    result = {
        n: relative(x.detach(), w.detach(), 0.0)
        for n, x, w in zip(names, (got, *finals), wanted, strict=True)
    }
    names = [*(f"d_{n}" for n in tensors), *(f"d_{s.name}" for s in spec.states)][: len(grads)]
    largest = max((float(g.norm()) for g in grads if g is not None), default=0.0)
    for name, x, w in zip(names, (*gradients, *d_firsts), grads, strict=False):
        want = torch.zeros_like(x, dtype=torch.float64) if w is None and x is not None else w
        if want is not None:
            assert x is None or x.shape == want.shape, f"{name} has shape {x.shape}"
            result[name] = float(want.norm()) if x is None else relative(x, want, 1e-6 * largest)
    return result
