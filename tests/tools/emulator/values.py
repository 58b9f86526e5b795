"""Registers as arrays with an element for every thread of a CTA, and how instructions use them."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from .source import Kernel, Statement

Step = Callable[[], object]  # an instruction, for some threads
BASE = 1024  # where a CTA's shared memory begins: nothing lies at 0
_PLAIN = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Fault(AssertionError):
    """A kernel did what it must not, or what is not known here."""


def dtype_of(kind: str) -> np.dtype:
    """Of "s32", "f32", "b16", "pred"; bf16 and packed pairs are bits."""
    if kind == "pred":
        return np.dtype(bool)
    if kind in ("f16", "f32", "f64"):
        return np.dtype(f"f{int(kind[1:]) // 8}")
    bits = 32 if kind.endswith("x2") else int(kind.lstrip("bfsu"))
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")


class Registers:
    """Of all threads of a CTA, and what is the same for all of them.

    - `parameters`: numbers; `where` is the address of each, for those that are read through one.
    - `cta`: which CTA this is, and of how many.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.threads = kernel.threads
        self.all = {n: np.zeros(self.threads, _PLAIN[b]) for n, b in kernel.registers.items()}
        self.parameters = {
            name: np.zeros(1, f"u{size}") if size <= 8 else np.zeros(size, np.uint8)
            for name, size in kernel.parameters.items()
        }
        self.where = {name: (n + 1) << 20 for n, name in enumerate(kernel.parameters)}
        thread = np.arange(self.threads, dtype=np.uint32)
        self.thread = {"%tid.x": thread, "%laneid": thread % 32, "%warpid": thread // 32}
        axes = [f"%{what}.{axis}" for what in ("ctaid", "nctaid") for axis in "xyz"]
        self.cta = {name: np.zeros(1, np.uint32) for name in axes}

    def garbage(self, random: np.random.Generator) -> None:
        """What a register holds before it is written, nobody knows."""
        noise = random.integers(0, 2**64, self.threads, np.uint64, endpoint=False)
        for n, register in enumerate(self.all.values()):
            register[:] = noise >> np.uint64(n % 7)


class Lanes:
    """An instruction of some threads: how it reads and writes registers.

    Under a guard results go somewhere else first; `done` brings over those of whom it is true.

    - `cta`: the memories (`memory.Memories`).
    - `queues`: what these warps have begun (`copies.Queue`).
    """

    def __init__(
        self, registers: Registers, lanes: slice, statement: Statement, cta: Any = None,
        queues: Any = (),
    ) -> None:  # fmt: skip
        self.registers, self.lanes, self.cta, self.queues = registers, lanes, cta, queues
        self.words, self.operands = statement.words, statement.operands
        self.guard, self.opcode = statement.guard, statement.opcode
        self.count = lanes.stop - lanes.start
        self.warps = np.arange(lanes.start, lanes.stop) // 32
        self.held: list[tuple[np.ndarray, np.ndarray]] = []

    def unknown(self) -> Fault:
        return Fault(f"{self.opcode} is not known here")

    def active(self) -> np.ndarray | None:
        """For whom it happens, when asked; None: for all."""
        if self.guard is None:
            return None
        name, negated = self.guard
        here = self.registers.all[name][self.lanes]
        return ~here if negated else here

    def threads(self) -> np.ndarray:
        """For whom it happens, counted from the first of these."""
        active = self.active()
        return np.arange(self.count) if active is None else np.flatnonzero(active)

    def each(self, values: np.ndarray) -> np.ndarray:
        """An element for each thread."""
        return values if len(values) == self.count else np.broadcast_to(values, (self.count,))

    def get(self, operand: Any, kind: str) -> np.ndarray:
        """Values, as a view of the register or an array of one element."""
        dtype, registers = dtype_of(kind), self.registers
        own = registers.all.get(operand)
        if own is not None:
            if dtype.itemsize > own.dtype.itemsize:
                raise Fault(f"{kind} of a register of {own.dtype}")
            return own.view(dtype)[:: own.dtype.itemsize // dtype.itemsize][self.lanes]
        if operand in registers.thread:
            return registers.thread[operand][self.lanes].astype(dtype)
        if operand in registers.cta:
            return registers.cta[operand].view(dtype)
        if operand in registers.where:
            return np.array([registers.where[operand]], dtype)
        if operand == "global_smem":
            return np.array([BASE], dtype)
        return number(operand, dtype)

    def put(self, operand: str, kind: str) -> np.ndarray:
        """Where results go: all of the register, whatever the kind's size."""
        if operand == "_":
            return np.empty(self.count, dtype_of(kind))
        own, dtype = self.registers.all[operand], dtype_of(kind)
        if dtype.itemsize != own.dtype.itemsize:
            dtype = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{own.dtype.itemsize}")
        place = own.view(dtype)[self.lanes]
        if self.guard is None:
            return place
        self.held.append((place, np.empty_like(place)))
        return self.held[-1][1]

    def done(self, run: Step) -> Step:
        """`run`, and what it found goes where it belongs."""
        if not self.held:
            return run

        def guarded() -> None:
            run()
            active = self.active()
            for place, found in self.held:
                np.copyto(place, found, where=active)

        return guarded


def number(text: str, dtype: np.dtype) -> np.ndarray:
    """A literal: "12", "0x10", "-1", or the bits of a float as "0f3F800000"."""
    if text[:2] in ("0f", "0F"):
        bits = struct.pack("<I", int(text[2:], 16))
        return np.frombuffer(bits, dtype if dtype.itemsize == 4 else np.uint32)
    if text[:2] in ("0d", "0D"):
        return np.frombuffer(struct.pack("<Q", int(text[2:], 16)), dtype)
    try:
        value = int(text.rstrip("U"), 0)
    except ValueError:
        raise Fault(f"{text} is not known here") from None
    if dtype.kind == "b":
        return np.array([value != 0])
    bits = (value & (2 ** (8 * dtype.itemsize) - 1)).to_bytes(dtype.itemsize, "little")
    return np.frombuffer(bits, dtype)
