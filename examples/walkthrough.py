"""The architecture page: every stage of one compilation, each printed, in the order of the folders.

    python examples/walkthrough.py

A recurrence goes through the artefacts below. Each is immutable, prints itself and compares, each
arrow is one function, and the functions are called here one by one, as ``linalg_dsl/driver.py`` does.

    text -> RecurrenceSpec -> CanonicalRecurrence -> ChunkPlan forward, backward -> source -> torch op
"""

from __future__ import annotations

import torch

import linalg_dsl as ld
from linalg_dsl.codegen.options import CompileOptions
from linalg_dsl.codegen.schedule.cut import cut
from linalg_dsl.codegen.schedule.lower import lower
from linalg_dsl.driver import derive, emit
from linalg_dsl.language.parser import parse
from linalg_dsl.ops.draw import draw
from linalg_dsl.ops.reference import reference

TEXT = """\
recurrence delta_rule

input q : [K]
input k : [K] unit
input v : [V]
input beta : scalar in (0, 2)

S_t = S_{t-1} - beta_t k_t (k_tᵀ S_{t-1} - v_tᵀ)
o_t = S_tᵀ q_t
"""


def main() -> None:
    show("1. What a user writes: what the memory S holds under the key k is moved towards v", TEXT)

    # linalg_dsl/language: names and shapes are resolved, bindings put in, mistakes reported with carets
    spec = parse(TEXT)
    show("2. RecurrenceSpec (linalg_dsl/language)", spec)

    # linalg_dsl/planner: the line is brought to  S_t = D o S + sum L (W + Sigma U),  U = S^T B  by named
    # rewrites, then the chunk equations are derived, and the backward from them by one rule per op
    options = CompileOptions(chunk_size=16)
    artefacts = derive(spec, options, {})
    show("3. CanonicalRecurrence (linalg_dsl/planner/canonical.py)", artefacts.canonical)
    show("4. ChunkPlan, forward (linalg_dsl/planner/chunkwise.py)", artefacts.forward)
    show("5. ChunkPlan, backward (linalg_dsl/planner/adjoint.py)", artefacts.backward)

    # codegen/schedule: what needs no state is computed for all chunks at once, the rest on walks over them
    show("6. KernelPlan (codegen/schedule)", cut(lower(artefacts.forward, artefacts.backward)))

    # codegen/emit: the same two plans as a plain PyTorch module, and as Triton kernels with their launchers
    show("7. PyTorch module (codegen/emit/torch_module.py)", emit(artefacts, "torch", options))
    show("8. Triton module (codegen/emit/triton_module.py)", emit(artefacts, "triton", options))

    # ops: the module becomes a torch operator with gradients; the step loop is the judge
    op = ld.compile(spec, backend="torch", chunk_size=16)
    tensors = draw(spec, B=1, T=70, H=2, K=8, V=4, dtype=torch.float64)
    o = op(**tensors)
    expected, _ = reference(spec, tensors)
    error = float((o - expected).norm() / expected.norm())
    show("9. The op against the step loop (ops/)", f"{op}\nrelative error of o in float64: {error:.1e}")
    assert error < 1e-10
    report = op.check(B=1, T=70, H=2, K=8, V=4, dtype=torch.float64)
    show("10. The same for the final state and every gradient (op.check)", report)
    assert report.ok


def show(title: str, artefact: object) -> None:
    print(f"\n{title}\n{'=' * len(title)}\n{artefact}")


if __name__ == "__main__":
    main()
