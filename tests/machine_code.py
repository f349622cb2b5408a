"""Walks the machine code of a compiled kernel and looks at the addresses that it would touch.

The assembler has its faults too: a kernel whose text, and whose PTX, stay inside their tensors may not. Here
integers are computed as sm_90 and sm_80 do, a register of all threads of a program at once; of numbers that
are not integers nothing is known, nor of what is made of them (``None``), and an access whose address is not
known is counted and not looked at. Tensors of integers have their numbers. Every other access has to lie in
one of the tensors that the kernel was given, and no descriptor may be made of a register without a value.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from machine_rules import IDLE, LOW, MEMORY, RULES, Words, after, signed

GAP = 1 << 38
PARAMETERS = {90: 0x210, 80: 0x160}
_MOST_STEPS = 400_000


@dataclass
class Argument:
    """A tensor of ``bytes`` bytes, with its numbers where they are integers; or a number (its 32 bits)."""

    name: str
    bytes: int = 0
    data: np.ndarray | None = None
    value: int | None = None
    base: int = 0


@dataclass
class Walk:
    """What was seen: accesses looked at, those whose address was not known, and words about wrong ones."""

    seen: int = 0
    unknown: int = 0
    wrong: list[str] = field(default_factory=list)


class Machine:
    """One program of a kernel; ``parameters``: arguments in the order of the kernel's parameters."""

    def __init__(
        self, code: Sequence[tuple[int, str]], arch: int, threads: int, parameters: Sequence[Argument]
    ) -> None:
        self.code, self.threads = code, threads
        self.places = {place: i for i, (place, _) in enumerate(code)}
        self.constant: dict[int, int] = {}
        at = PARAMETERS[arch]
        self.tensors = []
        for n, argument in enumerate(parameters, 1):
            if argument.value is not None:
                self.constant[at] = argument.value & LOW
                at += 4
                continue
            at = (at + 7) // 8 * 8
            argument.base = n * GAP + 0x1000
            self.constant[at], self.constant[at + 4] = argument.base & LOW, argument.base >> 32
            at += 8
            self.tensors.append(argument)
        self.constant |= {0x208: 0, 0x20C: 0, 0x28: 0xFFFDC0, 0x118: 0, 0x11C: 0}

    def walk(self, program: int, out: Walk) -> None:
        zeros = np.zeros(self.threads, np.int64)
        self.registers: dict[str, Words] = {"RZ": zeros, "URZ": zeros, "SRZ": zeros}
        self.flags: dict[str, Words] = {"PT": zeros == 0, "UPT": zeros == 0}
        self.special = {
            "SR_TID.X": np.arange(self.threads),
            "SR_CTAID.X": zeros + program,
            "SR_LANEID": np.arange(self.threads) % 32,
        }
        self.local: dict[tuple[str, int], Words] = {}
        self.places_of_threads, self.out = np.zeros(self.threads, np.int64), out
        alive = zeros == 0
        for _ in range(_MOST_STEPS):
            if not alive.any():
                return
            at = int(self.places_of_threads[alive].min())
            self.mask = alive & (self.places_of_threads == at)
            text = self.code[at][1]
            guard = re.match(r"@(!?)(U?P(?:\d|T))\s+", text)
            if guard:
                text = text[guard.end() :]
                flag = self.flags.get(guard[2])
                if flag is None:  # not known: the instruction is left out, and what it writes is not known
                    self.places_of_threads[self.mask] = at + 1
                    target = re.search(r"BRA.*0x([0-9a-f]+)", text)
                    if text.startswith("EXIT"):  # what follows may not be for these threads
                        alive = alive & ~self.mask
                    elif target and int(target[1], 16) > self.code[at][0]:
                        self.places_of_threads[self.mask] = self.places[int(target[1], 16)]
                    else:
                        self._forget(text)
                    continue
                taken = self.mask & (~flag if guard[1] else flag)
            else:
                taken = self.mask
            self.places_of_threads[self.mask] = at + 1
            self.mask, self.at = taken, self.code[at][0]
            if not taken.any():
                continue
            name, _, rest = text.partition(" ")
            operands = [x.strip() for x in rest.split(",")] if rest else []
            root, *kinds = name.split(".")
            if root == "EXIT":
                alive = alive & ~taken
            elif root == "BRA":
                self.places_of_threads[taken] = self.places[int(operands[-1].strip("`()"), 16)]
            elif root in IDLE:
                pass
            elif root in MEMORY:
                self._access(root, kinds, operands)
            elif (rule := RULES.get(root)) is not None:
                rule(self, kinds, operands)
            else:
                self._forget(text)
        raise AssertionError(f"the kernel does not end: {self.code[at - 6 : at + 2]}")

    # -- operands ---------------------------------------------------------------------------------------
    def get(self, text: str) -> Words:
        text = text.replace(".reuse", "").strip()
        if text.startswith("-") and not text.startswith("-0x"):
            x = self.get(text[1:])
            return None if x is None else (-x) & LOW
        if text.startswith("~"):
            x = self.get(text[1:])
            return None if x is None else (~x) & LOW
        if text.startswith("|"):
            x = self.get(text[1:-1])
            return None if x is None else np.abs(signed(x))
        if re.fullmatch(r"-?0x[0-9a-f]+|-?\d+", text):
            return np.full(self.threads, int(text, 0) & LOW, np.int64)
        if found := re.fullmatch(r"c\[0x0\]\[0x([0-9a-f]+)\]", text):
            value = self.constant.get(int(found[1], 16))
            return None if value is None else np.full(self.threads, value, np.int64)
        return self.registers.get(text)

    def wide(self, text: str) -> Words:
        """The 64 bits of a register and the next."""
        text = text.replace(".reuse", "").removesuffix(".64")
        if found := re.fullmatch(r"c\[0x0\]\[0x([0-9a-f]+)\]", text):
            low, high = self.get(text), self.get(f"c[0x0][0x{int(found[1], 16) + 4:x}]")
        elif text.lstrip("-").startswith("0x"):
            return np.full(self.threads, int(text, 0), np.int64)
        else:
            low, high = self.get(text), self.get(after(text, 1))
        return None if low is None or high is None else (low | high << 32)

    def put(self, name: str, value: Words) -> None:
        if name in ("RZ", "URZ"):
            return
        if value is None:
            self.registers[name] = None
            return
        value = value & LOW
        old = self.registers.get(name)
        if not self.mask.all() and old is not None:
            value = np.where(self.mask, value, old)
        elif not self.mask.all() and name not in self.registers:
            value = np.where(self.mask, value, 0)
        self.registers[name] = value

    def put_wide(self, name: str, value: Words) -> None:
        self.put(name, None if value is None else value & LOW)
        self.put(after(name, 1), None if value is None else (value >> 32) & LOW)

    def flag(self, text: str) -> Words:
        x = self.flags.get(text.lstrip("!"))
        return None if x is None else ~x if text.startswith("!") else x

    def put_flag(self, name: str, value: Words) -> None:
        if name in ("PT", "UPT"):
            return
        old = self.flags.get(name)
        if value is not None and old is not None:
            value = np.where(self.mask, value, old)
        self.flags[name] = value

    def _forget(self, text: str) -> None:
        """What an instruction writes that is not followed."""
        name, _, rest = text.partition(" ")
        for operand in rest.split(",")[
            : 2 if name.split(".")[0] in ("PLOP3", "FSETP", "HSETP2", "DSETP") else 1
        ]:
            operand = operand.strip()
            if re.fullmatch(r"U?R\d+", operand):
                count = 4 if "MMA" in name or "LDSM" in name or ".128" in name or name.startswith("LD") else 2
                count = 64 if "GMMA" in name else count
                for i in range(count if "MMA" in name or name.startswith("LD") else 1):
                    self.registers[after(operand, i)] = None
            elif re.fullmatch(r"U?P\d", operand):
                self.flags[operand] = None

    # -- memory -----------------------------------------------------------------------------------------
    def _access(self, root: str, kinds: list[str], operands: list[str]) -> None:
        size = next((int(k) // 8 for k in kinds if k in ("32", "64", "128")), 4)
        size = next((int(k[1:]) // 8 for k in kinds if re.fullmatch(r"[US](8|16)", k)), size)
        if root in ("LDL", "STL"):  # what was spilled comes back
            name, place = (operands[0], operands[1]) if root == "LDL" else (operands[1], operands[0])
            for i in range(size // 4):
                key = (place, i)
                if root == "STL":
                    self.local[key] = self.get(after(name, i))
                else:
                    self.put(after(name, i), self.local.get(key))
            return
        if root in ("LDG", "STG", "LDGSTS", "RED", "ATOMG"):
            where = operands[1] if root in ("LDG", "LDGSTS") else operands[0]
            last = operands[-1]
            asked = self.mask
            if root == "LDGSTS" and re.fullmatch(r"!?P(\d|T)", last):
                flag = self.flag(last)
                if flag is None:
                    self.out.unknown += 1
                    return
                asked = asked & flag
            found = re.search(r"\[(R\d+|RZ)\.64(?:\+(-?0x[0-9a-f]+))?\]", where)
            found = found or re.search(r"\[(U?R\d+)(?:\.64)?(?:\+(-?0x[0-9a-f]+))?\]", where)
            address = self.wide(found[1]) if found else None
            if found is None or address is None:
                self.out.unknown += 1
                if root == "LDG":
                    self._forget(f"LDG {operands[0]}")
                return
            address = address + int(found[2] or "0", 0)
            self.out.seen += 1
            self._look(root, address[asked], size)
            if root == "LDG":
                for i in range(size // 4):
                    self.put(after(operands[0], i), self._read(address + 4 * i))
                if size < 4:
                    self.put(operands[0], None)
            return
        if root == "LDS" or root == "LDSM":
            self._forget(f"{root}.128 {operands[0]}")

    def _look(self, root: str, address: np.ndarray, size: int) -> None:
        inside = np.zeros(address.shape, bool)
        for x in self.tensors:
            inside |= (address >= x.base) & (address + size <= x.base + x.bytes)
        if inside.all():
            return
        first = int(address[~inside][0])
        near = min(self.tensors, key=lambda x: abs(first - x.base))
        if len(self.out.wrong) < 8:
            self.out.wrong.append(
                f"{root} at 0x{self.at:x}: {int((~inside).sum())} of {address.size} threads, first at byte "
                f"{first - near.base} of {near.name}, which has {near.bytes}"
            )

    def _read(self, address: np.ndarray) -> Words:
        for x in self.tensors:
            at = address[self.mask]
            if ((at >= x.base) & (at + 4 <= x.base + x.bytes)).all():
                if x.data is None:
                    return None
                words = x.data.view(np.uint32)
                out = np.zeros(self.threads, np.int64)
                out[self.mask] = words[(at - x.base) // 4]
                return out
        return None


def walked(
    text: str, target: str, key: int, value: int, batch: int, length: int, heads: int, only: str = ""
) -> Iterator[tuple[str, Walk]]:
    """Every kernel that a bfloat16 call of this shape launches on ``target``: its name, what it touches.

    ``text`` is a module for whole sequences, ``only`` a part of the names of kernels. Of the programs the
    first, one in the middle and the last are walked.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from linalg_dsl.codegen import targets
    from linalg_dsl.codegen.machine_faults import instructions, undefined_reads

    place = targets.TARGETS[target]
    found: list[tuple[Any, int, dict[str, Any], dict[str, Any], int, int]] = []

    def record(
        call: Any, kernel: Any, programs: int, tensors: Any, tables: Any, scalars: Any, ratios: Any,
        more: Any, warps: int, stages: int,
    ) -> None:  # fmt: skip
        given = call.constants(kernel, ratios, more)
        constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        values = [
            *tensors,
            *tables,
            *scalars,
            call.heads,
            *(v for n, v in given.items() if n not in constants),
        ]
        named = dict(zip((n for n in kernel.arg_names if n not in constants), values, strict=True))
        constants |= {n: None for n, v in named.items() if v is None}
        found.append((kernel, programs, named, constants, warps, stages))

    with tempfile.TemporaryDirectory() as folder:
        module: Any = targets._load_for(place, text, Path(folder))
        module.Call.launch, host = record, torch.device("cpu")
        module.dense_tables = lambda batch, length, chunk, _: module.make_dense_tables(
            batch, length, chunk, host
        )
        if hasattr(module, "dense_piece_tables"):
            module.dense_piece_tables = lambda sizes, _: module.make_dense_piece_tables(sizes, host)
        tensors, states = targets._meta(module, key, value, "bfloat16", batch, length, heads)
        given = (tensors, states, (1.0,) * len(module.CONSTS), None)
        o, finals, residuals = module.forward(*given, True, True)
        module.backward(*given, residuals, torch.empty_like(o), finals)
    for kernel, programs, named, constants, warps, stages in found:
        if only not in kernel.__name__:
            continue
        types = {n: "constexpr" if n in constants else targets._type(named[n]) for n in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(types) if types[n].startswith("*")}
        compiled = triton.compile(
            ASTSource(kernel, signature=types, constexprs=constants, attrs=aligned),
            target=GPUTarget(place.backend, place.arch, place.warp),
            options={"num_warps": warps, "num_stages": stages},
        )
        given_arguments = [_argument(n, named[n]) for n in kernel.arg_names if n not in constants]
        given_arguments += [Argument("scratch"), Argument("profile")]  # which Triton adds
        code = instructions(compiled.asm["cubin"])
        machine = Machine(code, int(place.arch), 32 * warps, given_arguments)
        out = Walk(wrong=[f"{x} reads what nothing wrote" for x in undefined_reads(code)])
        for program in sorted({0, programs // 2, programs - 1}):
            machine.walk(program, out)
        yield kernel.__name__, out


def _argument(name: str, x: Any) -> Argument:
    import torch

    if isinstance(x, torch.Tensor):
        data = None if x.device.type == "meta" else np.ascontiguousarray(x.numpy())
        return Argument(name, max(1, x.numel()) * x.element_size(), data)
    return Argument(name, value=x if isinstance(x, int) else int(np.float32(x).view(np.uint32)))


def main() -> None:
    """``python tests/machine_code.py sm_90 gla,kda 256,64 100,60``: every kernel of these, both schedules."""
    import linalg_dsl as ld
    from linalg_dsl.ops.catalogue import catalogue_text

    target, names, *sizes = sys.argv[1:]
    wrong = 0
    for name in names.split(","):
        for schedule, shape in (("walk", (1, 700, 2)), ("walk", (2, 100, 64)), ("two_level", (1, 3000, 2))):
            text = ld.compile(catalogue_text(name), backend="triton", schedule=schedule).source(
                backend="triton"
            )
            for pair in sizes:
                key, value = map(int, pair.split(","))
                for kernel, out in walked(text, target, key, value, *shape):
                    print(kernel, pair, schedule, out.seen, out.unknown, *out.wrong[:2], flush=True)
                    wrong += bool(out.wrong)
    sys.exit(f"{wrong} kernels touch what is beside their tensors" if wrong else 0)


if __name__ == "__main__":
    main()
