"""Blackwell's tensor memory, 128 lanes of 512 columns, and its products: tcgen05.

Layouts are those of NVIDIA's PTX ISA, "TensorCore 5th Generation Family Instructions". An address
has the lane in its upper half and the column in its lower one. A product of 64 rows has 16 of them
in each warp's 32 lanes.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from .copies import barrier_at
from .matrix import Place, numbers_of
from .memory import address
from .values import Fault, Lanes, Step

COLUMNS = 512
_WIDTHS = {0: 16, 2: 128, 4: 64, 6: 32}
_KINDS = {"kind_f16": {0: "f16", 1: "bf16"}, "kind_tf32": {2: "tf32"}}


class TensorMemory:
    """That of a CTA, and the products that were begun."""

    def __init__(self) -> None:
        self.data = np.full((128, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.taken = 0
        self.products: list[Callable[[], None]] = []

    def finish(self, count: int) -> None:
        """The first products, which are those that somebody waits for."""
        for product in self.products[:count]:
            product()
        self.products[:count] = [_done] * count


def _done() -> None:
    """A product that has been made."""


def _rows(lane: int, count: int) -> np.ndarray:
    row = np.arange(count)
    return lane + (row if count == 128 else row // 16 * 32 + row % 16)


def _alloc(lanes: Lanes) -> Step:
    """Columns for the CTA; where they begin is written to shared memory."""
    where, count = lanes.operands
    at = address(lanes, where, 32)
    columns = int(count)

    def step() -> None:
        memory, which = lanes.cta.tensor_memory, lanes.threads()[:1]
        if not len(which):
            return
        if memory.taken + columns > COLUMNS:
            raise Fault(f"{memory.taken + columns} columns of tensor memory, of {COLUMNS}")
        found = np.array([[memory.taken]], np.uint32)
        lanes.cta.shared.write(at()[which], found, lanes.warps[which])
        memory.taken += columns

    return step


def _span(lanes: Lanes, where: tuple, count: int, apart: list[str]) -> Callable:
    """For each thread its lane and columns (threads, count). In the shape "32x32b" it has a lane of
    its own; in "16x32bx2" the upper half of a warp has those of the lower one, and columns that are
    so far `apart`."""
    if not {"32x32b", "16x32bx2"} & {*lanes.words}:
        raise lanes.unknown()
    at = address(lanes, where, 32)
    thread = np.arange(lanes.count) % 32
    own = thread % 16 if apart else thread
    more = np.where(thread >= 16, int(apart[0]), 0) if apart else 0

    def span() -> tuple[np.ndarray, np.ndarray]:
        base = at().astype(np.int64)
        column = (base & 0xFFFF) + more
        return ((base >> 16) + own)[:, None], column[:, None] + np.arange(count)

    return span


def _ld(lanes: Lanes) -> Step:
    to, where, *apart = lanes.operands
    span = _span(lanes, where, len(to), apart)
    outs = [lanes.put(x, "b32") for x in to]

    def step() -> None:
        found = lanes.cta.tensor_memory.data[span()]
        for n, out in enumerate(outs):
            out[:] = found[:, n]

    return lanes.done(step)


def _st(lanes: Lanes) -> Step:
    where, *apart, given = lanes.operands
    span = _span(lanes, where, len(given), apart)
    values = [lanes.get(x, "b32") for x in given]

    def step() -> None:
        which, (lane, column) = lanes.threads(), span()
        rows = np.stack([lanes.each(x) for x in values], 1)
        lanes.cta.tensor_memory.data[lane[which], column[which]] = rows[which]

    return step


def _mma(lanes: Lanes) -> Step:
    """A product into tensor memory, of a left factor there or in shared memory and a right one in
    shared memory; the one thread that asks says what of."""
    words = lanes.words
    to, a, b, how, adds = lanes.operands
    known = _KINDS.get(words[-1])
    if known is None or "cta_group_1" not in words:
        raise lanes.unknown()
    target, held = address(lanes, to, 32), isinstance(a, tuple)
    left = address(lanes, a, 32) if held else partial(lanes.get, a, "u64")
    right, how, adds = lanes.get(b, "u64"), lanes.get(how, "u32"), lanes.get(adds, "pred")

    def begin() -> None:
        for thread in lanes.threads():
            one = lambda x, thread=thread: lanes.each(x)[thread]
            asked = one(target()), one(left()), one(right), one(how)
            lanes.cta.tensor_memory.products.append(
                partial(product, *map(int, asked), bool(one(adds)))
            )

    def product(target: int, left: int, right: int, how: int, adds: bool) -> None:
        kind = known.get(how >> 7 & 7)
        if kind is None or how >> 10 & 7 != how >> 7 & 7 or how >> 4 & 3 != 1 or how >> 13 & 3:
            raise Fault(f"a product of kind {how:#x} is not known here")
        rows, n, k = (how >> 24 & 31) * 16, (how >> 17 & 63) * 8, 8 if kind == "tf32" else 16
        data = lanes.cta.tensor_memory.data
        if held:
            place = _rows(left >> 16, rows)[:, None], (left & 0xFFFF) + np.arange(8)
            halves = numbers_of(np.ascontiguousarray(data[place]).reshape(-1), kind)
            factor = np.stack(halves, 1).reshape(rows, k)
        else:
            factor = _place(left, bool(how >> 15 & 1)).factor(lanes.cta.shared, rows, k, kind)
        other = _place(right, bool(how >> 16 & 1)).factor(lanes.cta.shared, n, k, kind)
        place = _rows(target >> 16, rows)[:, None], (target & 0xFFFF) + np.arange(n)
        found = factor @ other.T
        data[place] = (data[place].view(np.float32) + found if adds else found).view(np.uint32)

    return begin


def _place(word: int, turned: bool) -> Place:
    return Place.of(word, turned, _WIDTHS, word >> 61)


def _commit(lanes: Lanes) -> Step:
    """A barrier is told when all products so far are made, which is when somebody waits for it."""
    bits = 32 if "shared_cluster" in lanes.words else 64
    at = address(lanes, lanes.operands[0], bits)

    def step() -> None:
        memory = lanes.cta.tensor_memory
        for thread in lanes.threads():
            barrier = barrier_at(lanes, int(at()[thread]))
            barrier.arrives_with(partial(memory.finish, len(memory.products)))

    return step


_AT_ONCE = ("relinquish_alloc_permit", "dealloc", "wait_ld", "wait_st")
_STEPS = {"alloc": _alloc, "ld": _ld, "st": _st, "mma": _mma, "commit": _commit}
_STEPS |= dict.fromkeys(_AT_ONCE, lambda lanes: lambda: None)


def _tcgen05(lanes: Lanes) -> Step:
    if lanes.words[1] not in _STEPS:
        raise lanes.unknown()
    return _STEPS[lanes.words[1]](lanes)


MAKERS: dict[str, Callable[[Lanes], Step]] = {"tcgen05": _tcgen05}
