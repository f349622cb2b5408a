"""What the integer instructions of sm_80 and sm_90 compute, for the walk of machine_code.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from machine_code import Machine

Words = Any
"""A 32-bit register of every thread, an array of unsigned numbers in 64 bits; None where nothing is known."""
LOW = 0xFFFFFFFF


def signed(x: np.ndarray) -> np.ndarray:
    return (x ^ 0x80000000) - 0x80000000


def after(name: str, i: int) -> str:
    found = re.fullmatch(r"(U?R)(\d+)", name.replace(".reuse", "").removesuffix(".64"))
    return f"{found[1]}{int(found[2]) + i}" if found else name


def known(*given: Words) -> bool:
    return all(x is not None for x in given)


def _split(operands: list[str]) -> tuple[list[str], list[str]]:
    """(predicates written behind the result, the rest)."""
    flags = []
    rest = operands[1:]
    while rest and re.fullmatch(r"U?P(\d|T)", rest[0]):
        flags.append(rest.pop(0))
    return flags, rest


def _move(m: Machine, kinds: list[str], ops: list[str]) -> None:
    m.put(ops[0], m.get(ops[1]))


def _constant(m: Machine, kinds: list[str], ops: list[str]) -> None:
    if "64" in kinds:
        m.put_wide(ops[0], m.wide(ops[1]))
    else:
        m.put(ops[0], m.get(ops[1]))


def _special(m: Machine, kinds: list[str], ops: list[str]) -> None:
    x = m.special.get(ops[1])
    if ops[1] == "SRZ":
        m.put_wide(ops[0], np.zeros(m.threads, np.int64))
    else:
        m.put(ops[0], None if x is None else x.astype(np.int64))


def _imad(m: Machine, kinds: list[str], ops: list[str]) -> None:
    flags, rest = _split(ops)
    a, b = m.get(rest[0]), m.get(rest[1])
    if "WIDE" in kinds:
        c = m.wide(rest[2])
        c = np.zeros(m.threads, np.int64) if rest[2] in ("RZ", "URZ") else c
        x = None
        if known(a, b, c):
            one, two = (a, b) if "U32" in kinds else (signed(a), signed(b))
            with np.errstate(over="ignore"):
                x = one * two + c
        m.put_wide(ops[0], x)
        for f in flags:
            m.put_flag(f, None)
        return
    c = m.get(rest[2])
    if not known(a, b, c):
        # a zero times anything, as in a move
        if c is not None and any(x is not None and not x.any() for x in (a, b)):
            m.put(ops[0], c)
            return
        m.put(ops[0], None)
        return
    with np.errstate(over="ignore"):
        if "HI" in kinds:
            wide = (
                (a.astype(np.uint64) * b.astype(np.uint64))
                if "U32" in kinds
                else (signed(a) * signed(b)).astype(np.uint64)
            )
            m.put(ops[0], (wide >> np.uint64(32)).astype(np.int64) + c)
            return
        x = signed(a) * signed(b) + c
    if "X" in kinds:
        carry = m.flag(rest[3]) if len(rest) > 3 else None
        x = None if carry is None else x + carry
    m.put(ops[0], x)


def _add(m: Machine, kinds: list[str], ops: list[str]) -> None:
    if "64" in kinds:
        wides = [
            m.wide(x.lstrip("-")) if x not in ("RZ", "URZ") else np.zeros(m.threads, np.int64)
            for x in ops[1:]
        ]
        total = None
        if known(*wides):
            total = sum(-w if x.startswith("-") else w for x, w in zip(ops[1:], wides, strict=True))
        m.put_wide(ops[0], total)
        return
    flags, rest = _split(ops)
    parts = rest[:3] if len(rest) >= 3 else rest
    terms = [m.get(x) for x in parts]
    total = None
    if known(*terms):
        total = sum(terms)
        if "X" in kinds:
            for f in rest[3:]:
                carry = m.flag(f)
                if carry is None:
                    total = None
                    break
                total = total + carry
            # the complement of a term already stands for its negation less one
    m.put(ops[0], total)
    negative = sum(1 for x in parts if x.startswith("-") and not x.startswith("-0x"))
    for nth, f in enumerate(flags):  # of three terms there may be two carries, each a flag
        if total is None:
            m.put_flag(f, None)
            continue
        # x + ~y + 1 carries as the hardware's subtraction does; -0 carries by itself
        carry = total
        for x, t in zip(parts, terms, strict=True):
            if negative and x.startswith("-") and not x.startswith("-0x"):
                carry = carry + np.where(t == 0, 1 << 32, 0)
        m.put_flag(f, (carry >> 32) > nth)


def _lea(m: Machine, kinds: list[str], ops: list[str]) -> None:
    flags, rest = _split(ops)
    a, b = m.get(rest[0]), m.get(rest[1])
    if "HI" in kinds:
        high: Words
        if "SX32" in kinds:
            high = None if a is None else signed(a) >> 31
            shift = int(rest[2], 0)
            carries = rest[3:]
        else:
            high, shift, carries = m.get(rest[2]), int(rest[3], 0), rest[4:]
        x = None
        if known(a, b, high):
            wide = a | (high & LOW) << 32
            x = ((wide >> (32 - shift)) & LOW) + b
            if "X" in kinds:
                carry = m.flag(carries[0])
                x = None if carry is None else x + carry
        m.put(ops[0], x)
        for f in flags:
            m.put_flag(f, None if x is None else (x >> 32) > 0)
        return
    shift = int(rest[2], 0) if len(rest) > 2 else 0
    x = ((a << shift) & LOW) + b if known(a, b) else None
    m.put(ops[0], x)
    for f in flags:
        m.put_flag(f, None if x is None else (x >> 32) > 0)


def _logic(m: Machine, kinds: list[str], ops: list[str]) -> None:
    if re.fullmatch(r"U?P(\d|T)", ops[0]):  # written before the result
        ops = [ops[1], ops[0], *ops[2:]]
    flags, rest = _split(ops)
    table = int(rest[3], 0)
    terms = [m.get(x) for x in rest[:3]]
    if table in (0xC0, 0xFC, 0x3C) and terms[2] is None:
        terms[2] = np.zeros(m.threads, np.int64)
    x = None
    if known(*terms):
        a, b, c = terms
        x = np.zeros(m.threads, np.int64)
        for bits in range(8):
            if table >> bits & 1:
                x |= (a if bits & 4 else ~a) & (b if bits & 2 else ~b) & (c if bits & 1 else ~c)
    m.put(ops[0], x)
    for f in flags:
        m.put_flag(f, None if x is None else (x & LOW) != 0)


def _flag_logic(m: Machine, kinds: list[str], ops: list[str]) -> None:
    table, other = int(ops[5], 0), int(ops[6], 0)
    terms = [m.flag(x) for x in ops[2:5]]
    if not all(t is not None for t in terms):
        m.put_flag(ops[0], None)
        m.put_flag(ops[1], None)
        return
    a, b, c = terms
    index = a * 4 + b * 2 + c * 1
    m.put_flag(ops[0], (table >> index & 1) == 1)
    m.put_flag(ops[1], (other >> index & 1) == 1)


def _shift(m: Machine, kinds: list[str], ops: list[str]) -> None:
    low, by, high = (m.get(x) for x in ops[1:4])
    unsigned = "U32" in kinds or "U64" in kinds
    if "U64" not in kinds and "S64" not in kinds and "R" in kinds and ops[1] in ("RZ", "URZ"):
        x = None if not known(by, high) else (high if unsigned else signed(high)) >> by
    elif "U64" not in kinds and "S64" not in kinds and "L" in kinds and "HI" not in kinds:
        x = None if not known(low, by) else low << by
    elif not known(low, by, high):
        x = None
    else:
        wide = low | (high if unsigned or "L" in kinds else signed(high)) << 32
        if "L" in kinds:
            moved = wide << by
        elif unsigned:
            moved = (wide.astype(np.uint64) >> by.astype(np.uint64)).astype(np.int64)
        else:
            moved = wide >> by
        x = moved >> 32 if "HI" in kinds else moved
    m.put(ops[0], x)


def _extend(m: Machine, kinds: list[str], ops: list[str]) -> None:
    a, bits = m.get(ops[1]), int(ops[2], 0)
    if a is None:
        m.put(ops[0], None)
        return
    x = a & ((1 << bits) - 1)
    m.put(ops[0], x if "U32" in kinds else (x ^ (1 << (bits - 1))) - (1 << (bits - 1)))


def _compare(m: Machine, kinds: list[str], ops: list[str]) -> None:
    first, second, *rest = ops
    a, b = m.get(rest[0]), m.get(rest[1])
    want, joined = kinds[0], next(k for k in kinds if k in ("AND", "OR", "XOR"))
    with_flag = m.flag(rest[2])
    x = None
    if known(a, b):
        one, two = (a, b) if "U32" in kinds else (signed(a), signed(b))
        x = {
            "LT": one < two, "LE": one <= two, "GT": one > two, "GE": one >= two, "EQ": one == two,
            "NE": one != two,
        }[want]  # fmt: skip
        if "EX" in kinds:  # the lower halves decide where the upper are equal
            low = m.flag(rest[3])
            x = (
                None
                if low is None
                else np.where(
                    one == two,
                    low,
                    x if want not in ("GE", "LE") else (one > two if want == "GE" else one < two),
                )
            )
            if want == "NE" and low is not None:
                x = (one != two) | low
            if want == "EQ" and low is not None:
                x = (one == two) & low
    for name, value in ((first, x), (second, None if x is None else ~x)):
        if with_flag is None or value is None:
            decided = None
            if joined == "AND" and with_flag is not None and not with_flag.any():
                decided = with_flag
            m.put_flag(name, decided)
        else:
            m.put_flag(
                name, {"AND": value & with_flag, "OR": value | with_flag, "XOR": value ^ with_flag}[joined]
            )


def _select(m: Machine, kinds: list[str], ops: list[str]) -> None:
    flag, a, b = m.flag(ops[3]), m.get(ops[1]), m.get(ops[2])
    if flag is not None and flag.all():
        m.put(ops[0], a)
    elif flag is not None and not flag.any():
        m.put(ops[0], b)
    else:
        m.put(ops[0], np.where(flag, a, b) if flag is not None and known(a, b) else None)


def _smaller(m: Machine, kinds: list[str], ops: list[str]) -> None:
    a, b, flag = m.get(ops[1]), m.get(ops[2]), m.flag(ops[3])
    if flag is None or not known(a, b):
        m.put(ops[0], None)
        return
    one, two = (a, b) if "U32" in kinds else (signed(a), signed(b))
    m.put(ops[0], np.where(flag, np.minimum(one, two), np.maximum(one, two)))


def _permute(m: Machine, kinds: list[str], ops: list[str]) -> None:
    a, selector, b = (m.get(x) for x in ops[1:4])
    if kinds or not known(a, selector, b):
        m.put(ops[0], None)
        return
    both, out = a | b << 32, np.zeros(m.threads, np.int64)
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = both >> (8 * (nibble & 7)) & 255
        out |= np.where(nibble & 8, (byte >> 7) * 255, byte) << (8 * i)
    m.put(ops[0], out)


def _size(m: Machine, kinds: list[str], ops: list[str]) -> None:
    a = m.get(ops[1])
    m.put(ops[0], None if a is None else np.abs(signed(a)))


def _to_float(m: Machine, kinds: list[str], ops: list[str]) -> None:
    a = m.get(ops[1])
    if a is None:
        m.put(ops[0], None)
        return
    number = (a if "U32" in kinds or "RP" in kinds else signed(a)).astype(np.float32)
    m.put(ops[0], number.view(np.uint32).astype(np.int64))


def _reciprocal(m: Machine, kinds: list[str], ops: list[str]) -> None:
    a = m.get(ops[1])
    if a is None or "RCP" not in kinds:
        m.put(ops[0], None)
        return
    with np.errstate(divide="ignore"):
        x = np.float32(1) / a.astype(np.uint32).view(np.float32)
    m.put(ops[0], x.view(np.uint32).astype(np.int64))


def _from_float(m: Machine, kinds: list[str], ops: list[str]) -> None:
    a = m.get(ops[1])
    if a is None:
        m.put(ops[0], None)
        return
    number = np.nan_to_num(a.astype(np.uint32).view(np.float32).astype(np.float64))
    m.put(ops[0], np.clip(np.trunc(number), 0, LOW).astype(np.int64))


def _keep_flags(m: Machine, kinds: list[str], ops: list[str]) -> None:
    """P2R: flags as the bits of a byte of a register."""
    old, mask = m.get(ops[2]), int(ops[3], 0)
    shift = 8 * next((int(k[1]) for k in kinds if re.fullmatch(r"B\d", k)), 0)
    bits = [m.flags.get(f"P{i}") for i in range(7) if mask >> i & 1]
    if old is None or not all(b is not None for b in bits):
        m.put(ops[0], None)
        return
    new = np.zeros(m.threads, np.int64)
    for i in range(7):
        if mask >> i & 1:
            new |= m.flags[f"P{i}"].astype(np.int64) << i
    m.put(ops[0], (old & ~(mask << shift)) | new << shift)


def _take_flags(m: Machine, kinds: list[str], ops: list[str]) -> None:
    """R2P, which brings them back."""
    found = re.fullmatch(r"(U?R\w+)(?:\.reuse)?(?:\.B(\d))?", ops[1])
    assert found is not None
    x, mask = m.get(found[1]), int(ops[2], 0)
    for i in range(7):
        if mask >> i & 1:
            m.put_flag(f"P{i}", None if x is None else (x >> (8 * int(found[2] or 0) + i) & 1) == 1)


IDLE = {
    "NOP", "BAR", "DEPBAR", "LDGDEPBAR", "BSSY", "BSYNC", "WARPSYNC", "MEMBAR", "ERRBAR", "FENCE",
    "YIELD", "STS", "STSM", "WARPGROUP", "CCTL", "SYNCS", "UTMALDG", "NANOSLEEP", "BREAK", "CALL",
    "ARRIVES",
}  # fmt: skip
MEMORY = {"LDG", "STG", "LDGSTS", "LDS", "LDSM", "LDL", "STL", "RED", "ATOMG"}
RULES: Mapping[str, Callable[[Machine, list[str], list[str]], None]] = {
    "MOV": _move, "UMOV": _move, "R2UR": _move, "LDC": _constant, "ULDC": _constant, "S2R": _special,
    "S2UR": _special, "CS2R": _special, "IMAD": _imad, "UIMAD": _imad, "IADD3": _add, "UIADD3": _add,
    "VIADD": _add, "IADD": _add, "LEA": _lea, "ULEA": _lea, "LOP3": _logic, "ULOP3": _logic,
    "PLOP3": _flag_logic, "UPLOP3": _flag_logic, "SHF": _shift, "USHF": _shift, "SGXT": _extend,
    "USGXT": _extend, "ISETP": _compare, "UISETP": _compare, "SEL": _select, "USEL": _select,
    "VIMNMX": _smaller, "IMNMX": _smaller, "IABS": _size, "I2F": _to_float, "MUFU": _reciprocal,
    "F2I": _from_float, "PRMT": _permute, "P2R": _keep_flags, "R2P": _take_flags,
}  # fmt: skip
