"""A warpgroup runs a few lines of PTX, on tensors: what `device/relative_bias.py` has of it.

A register is a number of each of 128 threads. Arguments are the numbers of a product of 64 rows in
the layout of `affine_score.octet_layout`: (row, octet of columns, column in it).
"""

import re
from functools import lru_cache

import numpy as np
import torch

THREADS = 128
_THREAD = np.arange(THREADS)


def elementwise(asm: str, constraints: str, args: list, add) -> torch.Tensor:
    """The results of `inline_asm_elementwise`, all numbers of a thread at a time. An argument is a
    tensor, or a pointer (`simulator.Pointer`) whose `at` is one. `add` adds numbers to memory."""
    kinds = constraints.split(",")
    number = sum(k[0] == "=" for k in kinds)
    places = _places(number // 4)
    dtype = np.float32 if kinds[0] == "=f" else np.int32
    registers = {f"${n}": np.zeros(THREADS, dtype) for n in range(number)}
    for x in args:
        if hasattr(x, "at"):  # the only one; an address is a number of bytes
            memory = x.flat
            x = x.index().to(torch.int64) * memory.itemsize
        for column in x.contiguous().numpy().reshape(-1)[places].T:
            registers[f"${number}"] = column
            number += 1
    assert number == len(kinds)
    for line in _lines(asm):
        _run(*line, registers, memory, add)
    made = np.zeros(places.size, dtype)
    for n, column in enumerate(places.T):
        made[column] = registers[f"${n}"]
    return torch.from_numpy(made.reshape(64, -1, 8))


@lru_cache
def _places(eights: int) -> np.ndarray:
    """(thread, number): which pair is a thread's n-th."""
    thread, n = _THREAD[:, None], np.arange(4 * eights)
    row = thread // 32 * 16 + n // 2 % 2 * 8 + thread % 32 // 4
    return (row * eights + n // 4) * 8 + thread % 4 * 2 + n % 2


@lru_cache
def _lines(asm: str) -> list[tuple]:
    """Guard, operation, the address and what is added to it, and the other operands."""
    found = []
    for line in asm.strip("{}\n ").split(";"):
        guard, op, rest = re.fullmatch(r"\s*(?:@(\S+) )?(\S*)(.*)", line, re.DOTALL).groups()
        if op and op != ".reg":
            address = re.search(r"\[(\$?\w+) \+ (-?\d+)\]", rest)
            names = re.findall(r"[\w$%-]+", re.sub(r"\[.*\]", "", rest))
            found.append((guard, op, address and (address[1], int(address[2])), names))
    return found


_OPS = {
    "mov.u32": lambda a: a, "mov.f32": lambda a: a, "add.f32": np.add, "add.s32": np.add,
    "sub.s32": np.subtract, "and.b32": np.bitwise_and, "or.b32": np.bitwise_or,
    "shr.u32": np.right_shift, "shl.b32": np.left_shift, "setp.lt.s32": np.less,
    "setp.ne.s32": np.not_equal, "selp.f32": lambda a, b, condition: np.where(condition, a, b),
    "mov.b32": lambda a: a.view(np.int32), "max.u32": np.maximum, "setp.eq.s32": np.equal,
    "selp.b32": lambda a, b, condition: np.where(condition, a, b).astype(np.int32),
    "selp.b64": lambda a, b, condition: np.where(condition, a, b).astype(np.int64),
    "cvt.u64.u32": lambda a: a.astype(np.int64), "shl.b64": lambda a, n: a << n,
    "neg.s64": np.negative, "add.s64": np.add,
    "shfl.sync.idx.b32": lambda a, lane, *_: a[_THREAD // 32 * 32 + lane],
    "shfl.sync.bfly.b32": lambda a, mask, *_: a[_THREAD ^ mask],
}  # fmt: skip


def _run(guard, op, address, names, registers, memory, add) -> None:
    def value(name: str):
        if name in registers:
            return registers[name]
        if name == "%laneid":
            return _THREAD % 32
        return np.float32(0) if name == "0f00000000" else int(name, 0)

    if address is None:
        assert guard is None
        registers[names[0]] = _OPS[op](*map(value, names[1:]))
        return
    at, rest = np.divmod(registers[address[0]] + address[1], memory.itemsize)
    assert not rest.any()
    if op.startswith("ld.global.nc.v"):
        assert f".v{len(names)}." in op
        assert at.min() >= 0
        assert at.max() + len(names) <= len(memory)
        assert not (at % len(names)).any(), "misaligned"
        for n, name in enumerate(names):
            registers[name] = memory.numpy()[at + n]
    else:
        kind = {torch.float32: "f32", torch.int64: "u64"}[memory.dtype]
        assert op == f"red.relaxed.gpu.global.add.{kind}"
        there = np.ones(THREADS, bool)
        if guard:
            there = registers[guard.strip("!")] != guard.startswith("!")
        at, numbers = at[there], value(names[0])[there]
        assert 0 <= at.min() <= at.max() < len(memory)
        add(memory, torch.from_numpy(at), torch.from_numpy(numbers))
