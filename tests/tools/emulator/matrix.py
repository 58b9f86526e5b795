"""ldmatrix, stmatrix, mma and wgmma: who holds which element, and where it lies in shared memory.

Layouts are those of NVIDIA's PTX ISA, "Matrix fragments". In all of them a warp is 8 groups of 4
threads: thread 4 g + t holds the elements 2 t and 2 t + 1 of row g (of 16 bits; of 32 bits t).
"""

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from .conversions import f32_of
from .memory import Shared, address
from .values import Fault, Lanes, Step

# -- fragments in registers ------------------------------------------------------------------------


def numbers_of(register: np.ndarray, kind: str) -> tuple[np.ndarray, ...]:
    """What a register of 32 bits holds, as float32: two of 16 bits, or one."""
    if kind == "bf16":
        low = (register << np.uint32(16)).view(np.float32)
        return low, (register & np.uint32(0xFFFF0000)).view(np.float32)
    if kind == "f16":
        both = register.view(np.float16).astype(np.float32)
        return both[0::2], both[1::2]
    if kind == "tf32":  # the lowest 13 bits are not looked at
        return ((register & np.uint32(0xFFFFE000)).view(np.float32),)
    raise Fault(f"{kind} is not known here")


def _left(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """The left factors (warps, 16, columns): below and beside each other lie four registers."""
    each = [numbers_of(np.ascontiguousarray(r), kind) for r in registers]
    n = len(each[0])
    out = np.empty((len(registers[0]) // 32, 2, 8, len(registers) // 2, 4, n), np.float32)
    for i, numbers in enumerate(each):
        for e, x in enumerate(numbers):
            out[:, i % 2, :, i // 2, :, e] = x.reshape(-1, 8, 4)
    return out.reshape(len(out), 16, -1)


def _right(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """The right factors (warps, rows, 8)."""
    each = [numbers_of(np.ascontiguousarray(r), kind) for r in registers]
    n = len(each[0])
    out = np.empty((len(registers[0]) // 32, len(registers), 4, n, 8), np.float32)
    for i, numbers in enumerate(each):
        for e, x in enumerate(numbers):
            out[:, i, :, e] = x.reshape(-1, 8, 4).swapaxes(1, 2)
    return out.reshape(len(out), -1, 8)


def _mma(lanes: Lanes) -> Step:
    """A product of 16 x 8 for every warp."""
    known = re.search(r"\.m16n8k(?:8|16)\.row\.col\.f32\.(\w+)\.\1\.f32$", lanes.opcode)
    if not known:
        raise lanes.unknown()
    kind = known[1]
    outs, a, b, c = lanes.operands
    left, right = ([lanes.get(x, "b32") for x in names] for names in (a, b))
    before, outs = [lanes.get(x, "f32") for x in c], [lanes.put(x, "f32") for x in outs]

    def step() -> None:
        product = _left(left, kind) @ _right(right, kind)
        parts = product.reshape(-1, 2, 8, 4, 2)
        for n, (add, out) in enumerate(zip(before, outs, strict=True)):
            np.add(parts[:, n // 2, :, :, n % 2].reshape(-1), add, out)

    return lanes.done(step)


# -- 8 x 8 matrices between shared memory and registers --------------------------------------------


def _rows(lanes: Lanes, where: tuple, count: int) -> tuple[Callable[[], np.ndarray], np.ndarray]:
    """Where the rows of so many matrices are, which threads 8 n to 8 n + 7 say of matrix n; and of
    which warp each row is."""
    at = address(lanes, where, 32)
    rows = lambda: at().reshape(-1, 32)[:, : 8 * count].ravel()
    return rows, np.repeat(lanes.warps[::32], 8 * count)


def _ldmatrix(lanes: Lanes) -> Step:
    to, where = lanes.operands
    outs = [lanes.put(x, "b32") for x in to]
    turned, (rows, warps) = "trans" in lanes.words, _rows(lanes, where, len(to))

    def step() -> None:
        found = lanes.cta.shared.read(rows(), np.dtype(np.uint16), 8, warps)
        found = found.reshape(-1, len(to), 8, 8)
        if turned:
            found = found.swapaxes(2, 3)
        pairs = np.ascontiguousarray(found).view(np.uint32)  # (warps, count, 8, 4)
        for n, out in enumerate(outs):
            out[:] = pairs[:, n].reshape(-1)

    return lanes.done(step)


def _stmatrix(lanes: Lanes) -> Step:
    where, given = lanes.operands
    values = [lanes.get(x, "b32") for x in given]
    turned, (rows, warps) = "trans" in lanes.words, _rows(lanes, where, len(given))

    def step() -> None:
        pairs = np.stack([np.ascontiguousarray(x).reshape(-1, 8, 4) for x in values], 1)
        matrices = np.ascontiguousarray(pairs).view(np.uint16)  # (warps, count, 8, 8)
        if turned:
            matrices = matrices.swapaxes(2, 3)
        matrices = np.ascontiguousarray(matrices).reshape(-1, 8)
        lanes.cta.shared.write(rows(), matrices, warps)

    return step


# -- products of a warpgroup -----------------------------------------------------------------------


def _product(lanes: Lanes) -> Step:
    """64 x n, of a left factor in registers or shared memory and a right one there."""
    *_, shape, to, kind, other = lanes.words
    size = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    out, a, b, scaled, *more = lanes.operands
    held = isinstance(a, list)
    signs, turned = more[:2], [x != "0" for x in more[2:]]
    if not size or to != "f32" or kind != other or signs != ["1", "1"]:
        raise lanes.unknown()
    if lanes.count % 128 or lanes.lanes.start % 128:
        raise Fault("not a whole warpgroup")
    n, k = int(size[1]), int(size[2])
    over = [False, *turned, False] if held else [*turned, False, False]
    left = [lanes.get(x, "b32") for x in a] if held else lanes.get(a, "b64")
    right, keep = lanes.get(b, "b64"), lanes.get(scaled, "pred")
    outs = [lanes.put(x, "f32") for x in out]

    def place(word: int, turned: bool) -> Place:
        return Place.of(word, turned, _WIDTHS, word >> 62)

    def product(threads: slice, factor: int | None, other: int, adds: bool) -> None:
        if factor is None:
            first = _left([x[threads] for x in left], kind).reshape(64, k)
        else:
            first = place(factor, over[0]).factor(lanes.cta.shared, 64, k, kind)
        second = place(other, over[1]).factor(lanes.cta.shared, n, k, kind)
        parts = (first @ second.T).reshape(4, 2, 8, n // 8, 4, 2)
        parts = parts.transpose(3, 1, 5, 0, 2, 4).reshape(len(outs), 128)
        for register, found in zip(outs, parts, strict=True):
            register[threads] = register[threads] + found if adds else found

    def begin() -> None:
        # What is asked is known now; what stands in memory and in registers, when it is done.
        each = [lanes.each(x)[::128] for x in (right, keep)]
        queues = lanes.queues[::4]
        lefts = [None] * len(queues) if held else lanes.each(left)[::128]
        for g, (queue, factor, other, adds) in enumerate(zip(queues, lefts, *each, strict=True)):
            threads = slice(128 * g, 128 * g + 128)
            first = None if factor is None else int(factor)
            queue.products.append(partial(product, threads, first, int(other), bool(adds)))

    return begin


def _wgmma(lanes: Lanes) -> Step:
    """Products, which are begun in groups and made when they are waited for."""
    if lanes.words[1] == "mma_async":
        return _product(lanes)
    if lanes.words[1] == "commit_group":
        return lambda: [queue.products.append(_group) for queue in lanes.queues]
    if lanes.words[1] == "wait_group":
        left = int(lanes.operands[0])
        return lambda: [_finish(queue.products, left) for queue in lanes.queues]
    if lanes.words[1] == "fence":
        return _group
    raise lanes.unknown()


def _group() -> None:
    """Ends a group of products; a fence has nothing to wait for here."""


def _finish(products: list[Step], groups: int) -> None:
    """All but the last groups."""
    ends = [n for n, product in enumerate(products) if product is _group]
    if len(ends) > groups:
        last = ends[len(ends) - groups - 1] + 1
        begun = products[:last]
        del products[:last]
        for product in begun:
            product()


class Place(NamedTuple):
    """Where a factor lies in shared memory, as a descriptor tells it: rows of `width` bytes in
    groups of eight; `leading` and `stride` are bytes from group to group."""

    begin: int
    leading: int
    stride: int
    width: int
    turned: bool  # neighbours in memory are of one column

    @staticmethod
    def of(word: int, turned: bool, widths: dict[int, int], code: int) -> "Place":
        if word >> 49 & 7:
            raise Fault("a factor that does not begin with eight rows is not known here")
        begin, leading, stride = (16 * (word >> at & 0x3FFF) for at in (0, 16, 32))
        if code not in widths:
            raise Fault(f"swizzle {code} is not known here")
        return Place(begin, leading, stride, widths[code], turned)

    def factor(self, shared: Shared, rows: int, k: int, kind: str) -> np.ndarray:
        """(rows, k)."""
        size = 4 if kind == "tf32" else 2
        found = shared.read_by_engine(self.addresses(rows, k, size), np.dtype(f"u{size}"))
        if kind == "bf16":
            return f32_of(found)
        if kind == "f16":
            return found.view(np.float16).astype(np.float32)
        return (found & np.uint32(0xFFFFE000)).view(np.float32)

    @lru_cache(maxsize=512)  # noqa: B019  (of a tuple)
    def addresses(self, rows: int, k: int, size: int) -> np.ndarray:
        """Where its elements of `size` bytes are: (rows, k)."""
        row, column = np.arange(rows)[:, None], np.arange(k)[None, :]
        if self.turned:
            per = self.width // size
            at = row // per * self.leading + column // 8 * self.stride
            at = at + column % 8 * self.width + row % per * size
        else:
            inner = column * size
            at = row // 8 * self.stride + row % 8 * self.width
            at = at + (inner if self.width > 16 else inner // 16 * self.leading + inner % 16)
        at = at + self.begin
        return at ^ (at >> 3 & (self.width - 16))


_WIDTHS = {0: 16, 1: 128, 2: 64, 3: 32}  # of a row: 16 bytes of it turn with the row


MAKERS: dict[str, Callable[[Lanes], Step]] = {
    "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "mma": _mma, "wgmma": _wgmma,
}  # fmt: skip
