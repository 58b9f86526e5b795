"""What an assembler made of a kernel: is every register written before it is read, and left alone while
a product reads or writes it?

`python tests/tools/sass.py kernel.cubin` prints where not.

The ptxas of CUDA 12.8, which Triton 3.6 brings along, can lose the instruction that fills a register: the
descriptor of a matrix in shared memory was then made of whatever stood there, and the kernel ended in an
illegal access, or in wrong numbers. Seen from PTX such a kernel is right, so this reads what nvdisasm prints.

A write counts on every path on which it may happen, under a predicate too, and where it is not certain how
many registers an instruction reads, the first one is meant. So what is found is a fault; a register
that still holds something older is not found.

The ptxas of CUDA 12.9, which Triton 3.8 and 3.9 bring along, can give a wgmma's left factor, where that is in
registers, to something else before the product has read it (triton-lang/triton#11781). So `in_flight`
follows products to the wait that ends them.

Whoever arrives at a barrier says that he has read: the copy engine may then write. That the assembler does
not wait for what LDSM reads before it arrives, `early` finds: on an H200 once in 70,000 times the numbers of
the next copy were read (docs/lab/forward.md).
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from triton.runtime.cache import get_cache_manager

import triton

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
_LINE = re.compile(r"\s+/\*(\w{4,})\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z]\S*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"(?<![\w.])(UR|UP|R|P)(\d+)(\.64)?")
_BASE = {"R": 0, "UR": 256, "P": 512, "UP": 520}  # where its kind begins among the bits of a set
_JUMPS = ("BRA", "BRX", "JMP", "JMX", "CALL", "RET", "EXIT", "BAR", "WARPSYNC", "NANOSLEEP", "KILL")


class Instruction(NamedTuple):
    address: str
    guard: str | None
    opcode: str
    operands: list[str]

    @property
    def kind(self) -> str:
        return self.opcode.split(".")[0]


def unwritten(cubin: bytes) -> list[str]:
    """Reads of registers that nothing has written, as "forward+0x2490: UIADD3 ... reads UR16"."""
    return [fault for name, section in _sections(cubin) for fault in _unwritten(name, section)]


def in_flight(cubin: bytes) -> list[str]:
    """Registers of a product that are touched before it is waited for, as "forward+0x2490: MOV ...
    writes R24 of HGMMA at 0x2400"."""
    return [fault for name, section in _sections(cubin) for fault in _in_flight(name, section)]


def early(cubin: bytes) -> list[str]:
    """Arrivals at a barrier while shared memory is being read, as "forward+0x2490: SYNCS.ARRIVE ...
    before R24 of LDSM at 0x2400 was needed"."""
    return [fault for name, section in _sections(cubin) for fault in _early(name, section)]


def products(cubin: bytes) -> int:
    """Matrix instructions of a warpgroup."""
    return sum(x.kind == "HGMMA" for _, section in _sections(cubin) for x in _parse(section)[0])


def loops(cubin: bytes) -> list[list[Instruction]]:
    """The instructions of the innermost loops that multiply."""
    return [body for _, section in _sections(cubin) for body in _loops(section)]


def spilled(cubin: bytes) -> int:
    """Accesses to spilled registers in those loops."""
    return sum(x.kind in ("LDL", "STL") for body in loops(cubin) for x in body)


@lru_cache(maxsize=2)
def _sections(cubin: bytes) -> list[tuple[str, str]]:
    """Kernels, and what nvdisasm prints of them: once for all that is asked of a kernel."""
    known = triton.__version__.encode() + cubin
    cache = get_cache_manager(hashlib.sha256(known).hexdigest())
    if file := cache.get_file("kernel.sass"):
        text = Path(file).read_text()
    else:
        text = _disassembled(cubin)
        cache.put(text, "kernel.sass", binary=False)
    sections = re.split(r"^\.section\s+\.text\.|^\.text\.", text, flags=re.M)[1:]
    return [(section.split(":", 1)[0], section) for section in sections]


def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [NVDISASM, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _unwritten(name: str, section: str) -> list[str]:
    code, successors = _parse(section)
    known = _may_be_written(code, successors)
    return [
        f"{name}+0x{x.address}: {x.opcode} {', '.join(x.operands)} reads {register}"
        for x, written in zip(code, known, strict=True)
        if written is not None
        for register in reads(x)
        if not written & _bit(register) and not _partly(x, register)
    ]


# A product in flight: its address, the registers that it reads, and those that it adds to.
_Product = tuple[str, frozenset[str], frozenset[str]]


def _in_flight(name: str, section: str) -> list[str]:
    """Groups of products, the oldest first, and of the last whether more may follow: on every path, until
    `DEPBAR.LE gsb0, n` leaves n of them. Other products may add to the same sums."""
    code, successors = _parse(section)
    begin: tuple[tuple[_Product, ...], ...] = ((),)
    seen, todo, found = {(0, begin)}, [(0, begin)], {}
    while todo:
        n, groups = todo.pop()
        x = code[n]
        if "GMMA" in x.kind:
            product = _product(x)
            groups = (*groups[:-1], (*groups[-1], product))
            if "gsb0" in x.operands:
                groups = (*groups, ())
        elif x.kind == "WARPGROUP" and ".DEPBAR.LE" in x.opcode:
            left = int(x.operands[1], 16)
            groups = groups[max(0, len(groups) - 1 - left) :]
        elif any(groups):
            touched = set(writes(x)), set(reads(x))
            for address, factor, sums in (product for group in groups for product in group):
                for does, registers, of in zip(
                    ("writes", "reads"), touched, (factor | sums, sums), strict=True
                ):
                    for register in sorted(registers & of):
                        text = f"{x.opcode} {', '.join(x.operands)} {does} {register}"
                        found[x.address] = f"{name}+0x{x.address}: {text} of HGMMA at 0x{address}"
        for m in successors[n]:
            if (m, groups) not in seen:
                seen.add((m, groups))
                todo.append((m, groups))
    return [found[address] for address in sorted(found, key=lambda a: int(a, 16))]


def _numbered(x: Instruction) -> bool:
    """Whether this is an arrival at a barrier of a ring, whose number is in a register."""
    return x.opcode.startswith("BAR.ARV") and x.operands[0].startswith("R")


def _early(name: str, section: str) -> list[str]:
    """From every LDSM on, until something reads what it loads, and so waits for it. But one that
    follows stores, and no wait for a barrier, reads what these have written, to change a layout.
    And from every product on, until it is waited for: arrivals at barriers that have numbers."""
    code, successors = _parse(section)
    found = []
    for start, product in enumerate(code):
        seen, todo = set(), list(successors[start]) if product.kind == "HGMMA" else []
        while todo:
            n = todo.pop()
            x = code[n]
            if n in seen or x.opcode.startswith("WARPGROUP.DEPBAR"):
                continue
            seen.add(n)
            if _numbered(x):
                text = f"{x.opcode} {', '.join(x.operands)} before HGMMA"
                found.append(f"{name}+0x{x.address}: {text} at 0x{product.address} was waited for")
            todo += successors[n]
    for start, load in enumerate(code):
        if load.kind != "LDSM":
            continue
        behind = (x for x in reversed(code[:start]) if x.kind in ("STS", "STSM", "SYNCS"))
        if not next((x.kind == "SYNCS" for x in behind if "ARRIVE" not in x.opcode), True):
            continue
        loaded, seen, todo = set(writes(load)), set(), list(successors[start])
        while todo:
            n = todo.pop()
            x = code[n]
            if n in seen or loaded & {r for o in _split(x)[1] for r in _named(o, 4)}:
                continue
            seen.add(n)
            if x.opcode.startswith("SYNCS.ARRIVE") or _numbered(x):
                text = f"{x.opcode} {', '.join(x.operands)} before {min(loaded)} of LDSM"
                found.append(f"{name}+0x{x.address}: {text} at 0x{load.address} was needed")
            todo += successors[n]
    return found


def _loops(section: str) -> list[list[Instruction]]:
    code, successors = _parse(section)
    # Behind the last EXIT stand the slow paths of waits, which jump back to where they came from.
    end = max(n for n, x in enumerate(code) if x.kind == "EXIT")
    found = [
        (m, n + 1)
        for n, to in enumerate(successors[:end])
        for m in to
        if code[n].kind == "BRA" and m <= n and any("MMA" in x.kind for x in code[m:n])
    ]
    inner = [x for x in found if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in found)]
    return [code[a:b] for a, b in inner]


def _product(x: Instruction) -> _Product:
    sums, *factors = x.operands
    left = factors[0]
    registers = _named(left, 4) if re.fullmatch(r"R\d+", left) else []
    return x.address, frozenset(registers), frozenset(_named(sums, _width(x)))


@lru_cache(maxsize=2)
def _parse(section: str) -> tuple[list[Instruction], list[list[int]]]:
    """Instructions, and the numbers of those that may follow each."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in section.splitlines():
        if found := _LINE.match(line):
            address, guard, opcode, operands = found.groups()
            code.append(Instruction(address, guard, opcode, re.split(r",\s*", operands)))
        elif found := re.match(r"([.$\w]+):$", line):
            labels[found[1]] = len(code)
    return code, _successors(code, labels)


def _successors(code: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """Where an instruction may go on. A return goes back behind every call."""
    behind = [n + 1 for n, x in enumerate(code) if x.kind == "CALL"]
    successors = []
    for n, x in enumerate(code):
        always = x.guard is None and (
            x.kind != "BRA" or (x.opcode == "BRA" and len(x.operands) == 1)
        )
        to = [] if always and x.kind in ("EXIT", "RET", "BRA") else [n + 1]
        if x.kind == "RET":
            to += behind
        elif x.kind in _JUMPS or x.kind.startswith("BR"):
            to += [labels[s] for s in re.findall(r"[.$\w]+", " ".join(x.operands)) if s in labels]
        successors.append([m for m in to if m < len(code)])
    return successors


def _may_be_written(code: list[Instruction], successors: list[list[int]]) -> list[int | None]:
    """The registers that may have been written before an instruction, as a set of bits; None for those
    that no path reaches."""
    known: list[int | None] = [None] * len(code)
    own = [sum({_bit(r) for r in writes(x)}) for x in code]
    known[0], todo = 0, [0]
    while todo:
        n = todo.pop()
        out = (known[n] or 0) | own[n]
        for m in successors[n]:
            before = known[m]
            after = out if before is None else out | before
            if after != before:
                known[m] = after
                todo.append(m)
    return known


def _bit(register: str) -> int:
    kind, number = re.fullmatch(r"(\D+)(\d+)", register).groups()  # type: ignore[union-attr]
    return 1 << _BASE[kind] + int(number)


def _named(text: str, count: int = 1) -> list[str]:
    """The registers of an operand; the first stands for `count`."""
    return [
        f"{kind}{int(number) + k}"
        for kind, number, pair in _REGISTER.findall(text)
        for k in range(max(count, 2 if pair else 1))
    ]


def _split(x: Instruction) -> tuple[list[str], list[str]]:
    """Operands that are written, and those that are read."""
    if x.kind in _JUMPS or not x.operands or "[" in x.operands[0]:
        return [], x.operands
    is_predicate = [bool(re.fullmatch(r"U?P(\d|T)", o)) for o in x.operands]
    n = 0
    while n < min(2, len(x.operands)) and is_predicate[n]:
        n += 1
    if n == 0 or not re.search(r"SETP|PLOP3|FCHK|VOTE", x.kind):
        n += n < len(x.operands) and "[" not in x.operands[n]
        last = n + 2
        while n < min(last, len(x.operands)) and is_predicate[n]:  # what carries
            n += 1
    return x.operands[:n], x.operands[n:]


def _width(x: Instruction) -> int:
    """Registers of a result, or more."""
    if found := re.match(r"[HIQ]GMMA\.64x(\d+)x\d+", x.opcode):
        return int(found[1]) // 2
    if found := re.search(r"\.x(\d+)$|\.x(\d+)\.", x.opcode):  # tensor memory
        return int(found[1] or found[2])
    if re.search(r"MMA|\.128|LDSM|\.256", x.opcode):
        return 8 if ".256" in x.opcode else 4
    wide = r"[._](?:[USBF]?64|WIDE)|^CS2R|^U?[DC]?(?:ADD|MUL|FMA|MNMX)2?\b|F32x2|^UMOV64"
    return 2 if re.search(wide, x.opcode) else 1


def _partly(x: Instruction, register: str) -> bool:
    """Whether a part of a register is set, and of the rest nothing is said: no fault."""
    return x.kind in ("PRMT", "LOP3") and x.operands[0] == register


def writes(x: Instruction) -> list[str]:
    if x.kind == "R2P":
        return [f"P{n}" for n in range(7)]
    return [r for o in _split(x)[0] for r in _named(o, 1 if "P" in o else _width(x))]


def reads(x: Instruction) -> list[str]:
    """Registers that are read for certain."""
    found = [] if x.guard in (None, "PT", "UPT") else [x.guard]
    matrix = "GMMA" in x.kind
    for place, operand in enumerate(_split(x)[1]):
        if described := re.search(r"gdesc\[UR(\d+)\]", operand):
            # On Hopper of A, which may stand in registers, and of B; later of one of the two.
            first = int(described[1])
            of = range(2) if not matrix else (2, 3) if place else range(4)
            found += [f"UR{first + k}" for k in of]
        elif matrix and operand.startswith("R") and operand[1:].isdigit():
            found += _named(operand, 4 if place == 0 else _width(x))
        elif described := re.match(r"desc\[(UR\d+)\](.*)", operand):
            found += _named(described[1], 2) + _named(described[2])
        else:
            found += _named(operand)
    return found


if __name__ == "__main__":
    for path in sys.argv[1:]:
        code = Path(path).read_bytes()
        print(*unwritten(code), *in_flight(code), *early(code), sep="\n")
