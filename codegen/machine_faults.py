"""A fault of the assembler that the machine code shows: a product whose operand lies nowhere.

A product of sm_90 (wgmma) is told by a 64-bit descriptor where in shared memory its operand lies. Where that
place is a constant, as of tiles that no loop copies ahead, ptxas 12.8 and 12.9 (Triton 3.4 to 3.7) at times
folds base and offset into two numbers and forgets the base: the descriptor is then made of a register that
nothing has written. Numbers are wrong, or the kernel reads outside shared memory, from run to run. The PTX is
right, and so is the code of ptxas 13.1 for it. Met here with two erases a token at K = V = 128; others have
reported the like (Triton pull request 7196, flash-linear-attention pull request 1262).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from linalg_dsl.codegen.cache import read_note, write_note

Code = Sequence[tuple[int, str]]
_NO_RESULT = ("USETP", "UISETP", "UTMA", "UBLKCP", "UCGABAR")
_WRITERS = ("U", "R2UR", "S2UR", "LDCU", "REDUX", "VOTEU")


def instructions(cubin: bytes) -> list[tuple[int, str]]:
    """(address, text) of every instruction, as Triton's ``cuobjdump`` prints them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        out = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", out, re.MULTILINE)
    return [(int(place, 16), text) for place, text in found]


def undefined_reads(code: Code) -> list[str]:
    """Instructions that read a uniform register which on no way to them has been written.

    Descriptors are kept in these. A write under a condition counts as one.
    """
    places = {place: i for i, (place, _) in enumerate(code)}
    parts = [_registers(text) for _, text in code]
    known: list[int | None] = [None] * len(code)  # a bit for each that may be written before an instruction
    waiting = [(0, 0)] if code else []
    while waiting:
        at, have = waiting.pop()
        while at < len(code):
            before = known[at]
            if before is not None and have | before == before:
                break
            known[at] = have = have | (before or 0)
            have |= parts[at][1]
            target, goes_on = _follows(code[at][1])
            if target in places:
                waiting.append((places[target], have))
            if not goes_on:
                break
            at += 1
    return [
        f"0x{place:x}: {text}"
        for (place, text), (reads, _), have in zip(code, parts, known, strict=True)
        if have is not None and reads & ~have
    ]


def fault_of(kernel: Any) -> str | None:
    """What is wrong with the machine code of a kernel that Triton compiled, if this is known to be a fault.

    Only kernels with such products are looked at, once for every text of PTX and cache directory.
    """
    ptx = getattr(kernel, "asm", {}).get("ptx")
    if not isinstance(ptx, str) or "wgmma.mma_async" not in ptx:
        return None
    name = f"machine_code_{kernel.hash}"
    seen = read_note(name)
    if seen is None:
        found = undefined_reads(instructions(kernel.asm["cubin"]))
        seen = found[0] if found else ""
        write_note(name, seen)
    return seen or None


def _registers(text: str) -> tuple[int, int]:
    """(read, written) uniform registers of an instruction, a bit each."""
    name, _, rest = _unguarded(text).partition(" ")
    operands = [x.strip() for x in rest.split(",")]
    result = None
    if name.startswith(_WRITERS) and not name.startswith(_NO_RESULT):
        result = next((i for i, x in enumerate(operands) if re.fullmatch(r"UR\d+", x)), None)
    reads = sum(1 << r for r in set(_read(name, [x for i, x in enumerate(operands) if i != result])))
    if result is None:
        return reads, 0
    return reads, (3 if ".64" in name or ".WIDE" in name else 1) << int(operands[result][2:])


def _read(name: str, operands: Sequence[str]) -> Iterator[int]:
    in_registers = name.startswith("HGMMA") and re.match(r"R\d+", operands[1]) is not None
    for x in operands:
        if found := re.search(r"gdesc\[UR(\d+)\]", x):  # of the left operand, then of the right one
            first = int(found[1])
            yield from range(first + 2 if in_registers else first, first + 4)
        else:
            yield from map(int, re.findall(r"\bUR(\d+)\b", x))


def _follows(text: str) -> tuple[int | None, bool]:
    """(where an instruction may jump to, whether the next one may follow)."""
    name, _, rest = _unguarded(text).partition(" ")
    root = name.split(".")[0]
    target = re.search(r"0x([0-9a-f]+)\)?$", rest) if root in ("BRA", "CALL", "BSSY") else None
    ends = root in ("EXIT", "RET") or (root == "BRA" and "," not in rest)
    return int(target[1], 16) if target else None, not ends or text.startswith("@")


def _unguarded(text: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", text)
