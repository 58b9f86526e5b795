"""What a launch may touch of global memory, and a CTA's shared memory, with who touched it when."""

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from .values import BASE, Fault, Lanes, Step, dtype_of, number

Addresses = np.ndarray  # of bytes, an element for each thread


class Global:
    """The tensors of a launch, each as the bytes of its storage."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.begins = sorted(begin for begin, size in storages.items() if size)
        self.bytes = [
            np.frombuffer((ctypes.c_char * storages[begin]).from_address(begin), np.uint8)
            for begin in self.begins
        ]

    def whole(self, at: Addresses, size: int) -> tuple[np.ndarray, int] | None:
        """The bytes of the tensor that has all of these, and where it begins."""
        low, high = int(at.min()), int(at.max()) + size
        n = bisect_right(self.begins, low) - 1
        if n < 0 or high > self.begins[n] + len(self.bytes[n]):
            return None
        return self.bytes[n], self.begins[n]

    def places(self, at: Addresses, size: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """For each tensor touched: which threads do, its bytes, and where it begins."""
        tensor = np.searchsorted(self.begins, at, "right")
        made = []
        for n in np.unique(tensor):
            which = tensor == n
            found = self.whole(at[which], size)
            if found is None:
                raise Fault(self.outside(at[which], size))
            made.append((which, *found))
        return made

    def outside(self, at: Addresses, size: int) -> str:
        for address in map(int, at):
            n = bisect_right(self.begins, address) - 1
            if n < 0:
                return f"{size} bytes at {address:#x}, before every tensor"
            past = address + size - self.begins[n] - len(self.bytes[n])
            if past > 0:
                return f"{past} bytes past the end of a tensor of {len(self.bytes[n])} bytes"
        raise AssertionError

    def read(self, at: Addresses, dtype: np.dtype, count: int) -> np.ndarray:
        """`count` numbers for each thread, side by side in memory: (threads, count)."""
        if found := self.whole(at, dtype.itemsize * count):
            data, begin = found
            return _aligned(data, dtype)[_elements(at - np.uint64(begin), dtype, count)]
        out = np.empty((len(at), count), dtype)
        for which, data, begin in self.places(at, dtype.itemsize * count):
            out[which] = _aligned(data, dtype)[
                _elements(at[which] - np.uint64(begin), dtype, count)
            ]
        return out

    def write(self, at: Addresses, values: np.ndarray) -> None:
        """Rows of `values`, one for each thread."""
        dtype, count = values.dtype, values.shape[1]
        if found := self.whole(at, dtype.itemsize * count):
            data, begin = found
            _aligned(data, dtype)[_elements(at - np.uint64(begin), dtype, count)] = values
            return
        for which, data, begin in self.places(at, dtype.itemsize * count):
            place = _elements(at[which] - np.uint64(begin), dtype, count)
            _aligned(data, dtype)[place] = values[which]


def _aligned(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)


def _elements(offsets: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    """Where numbers are: (threads, count). All of a thread's at once want an address that is a
    multiple of their size."""
    if (offsets % np.uint64(dtype.itemsize * count)).any():
        raise Fault(f"an address that is no multiple of {dtype.itemsize * count}")
    return offsets[:, None] // np.uint64(dtype.itemsize) + np.arange(count, dtype=np.uint64)


class Shared:
    """A CTA's shared memory, which begins at `BASE`.

    For every byte it is known which warp read and wrote it last, and between which barriers: by
    another warp with no barrier between is a race. That holds where all threads wait at every
    barrier; `watch` says whether they do. And what a thread has written, tensor cores and the copy
    engine may read behind a fence (`fence.proxy.async`) of that thread's.
    """

    MANY = 63  # in the place of a warp: several

    def __init__(self, size: int, watch: bool) -> None:
        self.size, self.watch = size, watch
        self.data = np.empty(size, np.uint8)
        self.written, self.seen = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.fresh = np.zeros(size, np.uint8)  # the warp that has not fenced what it wrote, plus 1
        self.epoch = 1

    def begin(self) -> None:
        """As a CTA finds it."""
        self.data[:] = 0xFF  # not a number, in every format
        self.fresh[:] = 0
        self.barrier()

    def barrier(self) -> None:
        """All have come to one."""
        self.epoch += 1

    def fence(self, warps: slice) -> None:
        """What these warps wrote may be read by others than threads."""
        self.fresh[(self.fresh > warps.start) & (self.fresh <= warps.stop)] = 0

    def read(self, at: Addresses, dtype: np.dtype, count: int, warps: np.ndarray) -> np.ndarray:
        """`count` numbers for each thread, (threads, count)."""
        offsets = self.offsets(at, dtype.itemsize * count)
        self.reads(_bytes(offsets, dtype.itemsize * count), warps)
        return _aligned(self.data, dtype)[_elements(offsets, dtype, count)]

    def write(
        self, at: Addresses, values: np.ndarray, warps: np.ndarray, *, fresh: bool = True
    ) -> None:
        """Rows of `values`, one for each thread."""
        size = values.dtype.itemsize * values.shape[1]
        offsets = self.offsets(at, size)
        places = _bytes(offsets, size)
        self.writes(places, warps)
        self.fresh[places] = warps[:, None] + 1 if fresh else 0
        values = values.view(f"u{values.dtype.itemsize}")
        where = _elements(offsets, values.dtype, values.shape[1])
        data = _aligned(self.data, values.dtype)
        data[where] = values
        if (data[where] != values).any():
            raise Fault("threads write different numbers to one place")

    def read_by_engine(self, at: Addresses, dtype: np.dtype) -> np.ndarray:
        """One number each, for a product or a copy to global memory."""
        offsets = self.offsets(at.reshape(-1), dtype.itemsize)
        places = _bytes(offsets, dtype.itemsize)
        if self.fresh[places].any():
            raise Fault("what a thread wrote is read behind no fence of its own")
        self.reads(places, np.full(len(places), self.MANY))
        return _aligned(self.data, dtype)[offsets // np.uint64(dtype.itemsize)].reshape(at.shape)

    def write_by_engine(self, at: Addresses, values: np.ndarray) -> None:
        """One number each."""
        offsets = self.offsets(at, values.dtype.itemsize)
        self.fresh[_bytes(offsets, values.dtype.itemsize)] = 0
        _aligned(self.data, values.dtype)[offsets // np.uint64(values.dtype.itemsize)] = values

    def offsets(self, at: Addresses, size: int) -> np.ndarray:
        offsets = at.astype(np.int64) - BASE
        if len(offsets) and (offsets.min() < 0 or offsets.max() + size > self.size):
            raise Fault(f"outside of {self.size} bytes of shared memory")
        return offsets.astype(np.uint64)

    def reads(self, where: np.ndarray, warps: np.ndarray) -> None:
        """Bytes (threads, size) are read by warps (threads)."""
        if not self.watch:
            return
        last, warp = self.written[where], warps[:, None]
        if ((last >> 6 == self.epoch) & (last & 63 != warp)).any():
            raise Fault("a race: another warp wrote that after the last barrier")
        before = self.seen[where]
        others = (before >> 6 == self.epoch) & (before & 63 != warp)
        self.seen[where] = self.epoch << 6 | np.where(others, self.MANY, warp)
        # Of several warps that read the same in one instruction the last one was written down.
        several = self.seen[where] & 63 != warp
        if several.any():
            self.seen[where[several | others]] = self.epoch << 6 | self.MANY

    def writes(self, where: np.ndarray, warps: np.ndarray) -> None:
        """Bytes (threads, size) are written by warps (threads), now or at any time from now on."""
        if not self.watch:
            return
        warp = warps[:, None]
        for last, what in ((self.written[where], "wrote"), (self.seen[where], "read")):
            if ((last >> 6 == self.epoch) & (last & 63 != warp)).any():
                raise Fault(f"a race: another warp {what} that after the last barrier")
        self.written[where] = self.epoch << 6 | warp


def _bytes(offsets: np.ndarray, size: int) -> np.ndarray:
    return offsets[:, None] + np.arange(size, dtype=np.uint64)


class Memories:
    """What the instructions of a CTA name; those of one kernel keep it from CTA to CTA."""

    def __init__(self, shared: Shared, random: np.random.Generator) -> None:
        self.globally, self.shared, self.random = Global(()), shared, random
        self.maps: dict[int, Any] = {}  # descriptors of tensors, by their address
        self.barriers: dict[int, Any] = {}  # by their address in shared memory
        self.tensor_memory: Any = None  # Blackwell's


# -- instructions ----------------------------------------------------------------------------------


def address(lanes: Lanes, operand: tuple, bits: int) -> Callable[[], Addresses]:
    """What says where, for each thread."""
    base, offset, *_ = operand
    register, more = lanes.get(base, f"u{bits}"), number(str(offset), dtype_of(f"u{bits}"))
    return lambda: lanes.each(register + more)


def _several(operand: Any) -> list:
    return operand if isinstance(operand, list) else [operand]


def _is_shared(lanes: Lanes) -> bool:
    shared = any(word.startswith("shared") for word in lanes.words)
    if not shared and "global" not in lanes.words:
        raise lanes.unknown()
    return shared


def _load(lanes: Lanes) -> Step:
    to, where, *_ = lanes.operands
    kind, names = lanes.words[-1], _several(to)
    dtype = dtype_of(kind)
    if lanes.words[1] == "param":
        given = lanes.registers.parameters[where[0]].view(np.uint8)[: dtype.itemsize].view(dtype)
        return lanes.done(partial(np.copyto, lanes.put(to, kind), given))
    shared = _is_shared(lanes)
    at = address(lanes, where, 32 if shared else 64)
    # Straight into registers, of those who load: a register larger than what is read is filled up.
    guard, lanes.guard = lanes.guard, None
    outs = [lanes.put(name, kind) for name in names]
    lanes.guard = guard

    def load() -> None:
        which = lanes.threads()
        if not len(which):
            return
        if shared:
            found = lanes.cta.shared.read(at()[which], dtype, len(outs), lanes.warps[which])
        else:
            found = lanes.cta.globally.read(at()[which], dtype, len(outs))
        for n, out in enumerate(outs):
            out[which] = found[:, n]

    return load


def _store(lanes: Lanes) -> Step:
    where, given = lanes.operands[:2]
    kind, shared = lanes.words[-1], _is_shared(lanes)
    at = address(lanes, where, 32 if shared else 64)
    values = [lanes.get(x, kind) for x in _several(given)]

    def store() -> None:
        which = lanes.threads()
        rows = np.stack([lanes.each(x) for x in values], 1)[which]
        if not len(which):
            return
        if shared:
            lanes.cta.shared.write(at()[which], rows, lanes.warps[which])
        else:
            lanes.cta.globally.write(at()[which], rows)

    return store


_TOGETHER: dict[str, Callable] = {
    "add": lambda a, b: a + b, "exch": lambda a, b: b,
    "max": lambda a, b: np.where(b > a, b, a), "min": lambda a, b: np.where(b < a, b, a),
    "cas": lambda a, b, c: np.where(a == b, c, a),
}  # fmt: skip


def _in_turn(threads: np.ndarray, places: Addresses) -> list[np.ndarray]:
    """Threads in groups of which each has places of its own; those of one place in their order."""
    by_place = threads[np.argsort(places[threads], kind="stable")]
    sorted_places = places[by_place]
    number = np.arange(len(by_place))
    first = np.maximum.accumulate(np.where(np.diff(sorted_places, prepend=0) != 0, number, 0))
    turn = number - first
    return [by_place[turn == n] for n in range(turn.max(initial=-1) + 1)]


def _atomic(lanes: Lanes) -> Step:
    """One thread after the other, in the order of their numbers."""
    if _is_shared(lanes):
        raise lanes.unknown()
    kind, together = lanes.words[-1], next(_TOGETHER[w] for w in lanes.words if w in _TOGETHER)
    to, where, *given = lanes.operands if lanes.words[0] == "atom" else ["_", *lanes.operands]
    at, dtype = address(lanes, where, 64), dtype_of(kind)
    outs = [] if to == "_" else [lanes.put(x, kind) for x in _several(to)]
    # By number, and of each what it is put together with.
    values = list(zip(*[[lanes.get(x, kind) for x in _several(g)] for g in given], strict=True))

    def step() -> None:
        memory, places = lanes.cta.globally, at()
        for threads in _in_turn(lanes.threads(), places):
            for n, more in enumerate(values):
                place = places[threads] + np.uint64(n * dtype.itemsize)
                before = memory.read(place, dtype, 1)[:, 0]
                after = together(before, *(lanes.each(x)[threads] for x in more))
                memory.write(place, after.astype(dtype)[:, None])
                if outs:
                    outs[n][threads] = before

    return lanes.done(step)


MAKERS: dict[str, Callable[[Lanes], Step]] = {
    "ld": _load, "st": _store, "atom": _atomic, "red": _atomic,
}  # fmt: skip
