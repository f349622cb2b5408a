"""A fault of the assembler is seen in the machine code, and the sizes that are chosen do not meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from linalg_dsl.codegen.machine_faults import undefined_reads

pytest.importorskip("triton")


def code(*lines: str) -> list[tuple[int, str]]:
    return [(16 * i, line) for i, line in enumerate(lines)]


def test_registers_that_nothing_wrote() -> None:
    assert undefined_reads([]) == []
    assert undefined_reads(code("UMOV UR4, 0x400", "UIADD3 UR5, UR4, 0x2, URZ", "EXIT")) == []
    assert undefined_reads(code("UMOV UR4, 0x400", "UIADD3 UR34, UP0, UR34, 0x2, URZ", "EXIT")) == [
        "0x10: UIADD3 UR34, UP0, UR34, 0x2, URZ"
    ]
    assert undefined_reads(code("ULDC.64 UR6, c[0x0][0x208]", "LDG.E R2, desc[UR6][R2.64+UR7]", "EXIT")) == []


def test_operands_of_products() -> None:
    """Two registers tell of the left operand, the next two of the right one."""
    right = ("UMOV UR10, 0x1", "UMOV UR11, 0x2")
    in_registers = "HGMMA.64x32x16.F32.BF16 R88, R120, gdesc[UR8], R88, gsb0"
    in_memory = "HGMMA.64x32x16.F32.BF16 R88, gdesc[UR8].tnspA, R88, gsb0"
    assert undefined_reads(code(*right, in_registers, "EXIT")) == []
    assert undefined_reads(code(right[0], in_registers, "EXIT")) == [f"0x10: {in_registers}"]
    assert undefined_reads(code(*right, in_memory, "EXIT")) == [f"0x20: {in_memory}"]


def test_ways_through_the_code() -> None:
    """A register counts as written if on any way it may have been; what is never reached is not looked at."""
    apart = ("@P0 BRA 0x30", "MOV R3, UR9", "EXIT", "UMOV UR9, 0x1", "BRA 0x10")
    assert undefined_reads(code(*apart)) == []
    assert undefined_reads(code("@!P0 UMOV UR9, 0x1", "MOV R3, UR9", "EXIT")) == []
    loop = ("MOV R3, UR9", "UIADD3 UR9, UR4, 0x1, URZ", "@P0 BRA 0x0", "EXIT")
    assert undefined_reads(code(*loop)) == ["0x10: UIADD3 UR9, UR4, 0x1, URZ"]
    assert undefined_reads(code("EXIT", "MOV R3, UR9")) == []
    assert undefined_reads(code("@P0 EXIT", "MOV R3, UR9", "EXIT")) == ["0x10: MOV R3, UR9"]
    assert (
        undefined_reads(code("BRA UP0, 0x30", "UMOV UR9, 0x1", "BRA 0x40", "UMOV UR9, 0x2", "MOV R3, UR9"))
        == []
    )


COMPILED = """
import json, sys
import linalg_dsl as ld
from linalg_dsl.codegen import targets
from linalg_dsl.ops.catalogue import catalogue_text
only, sizes = "delta_product_bwd_reverse_k", json.loads(sys.argv[1])
text = ld.compile(catalogue_text("delta_product"), backend="triton", invariant=True).source(backend="triton")
if sizes:
    text = text.replace("SIZES = {}", f"SIZES = {{{only!r}: {tuple(sizes)}}}")
compile_one = targets._compile
targets._compile = lambda x, place: compile_one(x, place) if x.kernel.__name__ == only else None
(found,) = filter(None, targets.report(text, "sm_90", key=128, value=128))
print(json.dumps([found.fault, found.stages, found.spilled]))
"""


def compiled(*sizes: int) -> tuple[str, int, int]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED, json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    fault, stages, spilled = json.loads(done.stdout.splitlines()[-1])
    return fault, stages, spilled


def assembler() -> tuple[int, ...]:
    from triton import knobs

    return tuple(int(x) for x in knobs.nvidia.ptxas.version.split("."))


def test_what_was_wrong_on_a_gpu_is_seen_and_not_chosen() -> None:
    """With blocks of 64 and one stage d k was off by a third on an H200, or the kernel read out of bounds."""
    fault, stages, _ = compiled(64, 4, 1)
    assert stages == 1
    if assembler() < (13, 1):
        assert "UR" in fault
    fault, stages, spilled = compiled()
    assert (fault, stages, spilled) == ("", 2, 0)
