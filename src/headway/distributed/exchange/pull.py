"""Rows are pulled out of the memory of the other cards of this host, by copy engines.

What a rank holds it lays into memory that all cards of the group see (symmetric memory); then it
says so, and each reader copies what it needs to where its kernel reads it. A collective's kernels
would take multiprocessors from attention; copy engines take none.

    main stream   lay n+1 out | kernel n                          | wait for n+1 | kernel n+1
    copy stream               | say it, wait for all | pull n+1

Nobody waits on the host. To say it is a write into the flags of every other rank, to wait for all
is a wait for theirs; both are operations of streams (`cuStreamWriteValue32`), not kernels, which a
persistent kernel would not let in. There are two regions in turns: what is laid out at turn t was
read before every rank said t - 1, since each pulls before it speaks again.

A rank that has left makes the others wait in their streams, where only the time limit of a later
collective ends them.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...caches import Cache
from ...errors import ArgumentError
from .collective import Collective, all_gather
from .routes import (
    Arriving,
    Parts,
    Returning,
    Routes,
    Transport,
    copy,
    message,
    rows_of,
    stacked,
    unstacked,
)

T = TypeVar("T")
_FLAGS = 4096  # bytes in front of the regions: a uint32 of every rank
_GRAIN = 1 << 21  # memory grows by multiples of this


class Memory:
    """Symmetric memory of a group: as much on every rank, which all of them see.

    - `turn`: how often something was laid out. Region `turn % 2` is the next.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.me, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.turn, self.capacity = 0, 0
        self.copies = torch.cuda.Stream(device)
        self.passed = torch.cuda.Event()  # when all ranks had said the last turn
        self.reserve(1)

    def reserve(self, count: int) -> None:
        """Room for `count` bytes in each region. All ranks call it with the same count."""
        if count <= self.capacity:
            return
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)  # nobody reads the old memory any more
        # A quarter more than before, so that lengths that vary soon make no new memory.
        capacity = -(-max(count, self.capacity * 5 // 4) // _GRAIN) * _GRAIN
        made = together(lambda: self._empty(symmetric, capacity), self.group, self.device)
        handle = together(
            lambda: symmetric.rendezvous(made, self.group), self.group, self.device
        )  # all flags are 0 by then
        self.own, self.handle, self.capacity, self.turn = made, handle, capacity, 0
        self.pointers = list(handle.buffer_ptrs)

    def _empty(self, symmetric: Any, capacity: int) -> Tensor:
        made = symmetric.empty(_FLAGS + 2 * capacity, dtype=torch.uint8, device=self.device)
        made[:_FLAGS].zero_()
        return made

    def of(self, rank: int, region: int, shapes: list[tuple], dtype: torch.dtype) -> list[Tensor]:
        """Tensors that lie one after the other in a region of a rank's memory."""
        at, found = (_FLAGS + region * self.capacity) // dtype.itemsize, []
        for shape in shapes:
            found.append(self.handle.get_buffer(rank, shape, dtype, at))
            at += found[-1].numel()
        return found

    def begin(self) -> None:
        """Before something is laid out in the current stream: its region has been read."""
        torch.cuda.current_stream(self.device).wait_event(self.passed)

    @contextmanager
    def laid_out(self) -> Iterator[None]:
        """Inside, copies are made of what all ranks have laid out."""
        self.turn += 1
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            self.meet()
            self.passed.record()
            yield

    def keep(self, x: Tensor) -> None:
        """What is written in the stream of copies is not given to others before."""
        x.record_stream(self.copies)

    def mark(self) -> Callable[[], None]:
        """What makes the current stream, when called, wait for the copies until now."""
        event = torch.cuda.Event()
        event.record(self.copies)
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def meet(self) -> None:
        """Say this turn to all ranks, and wait until all have, in the current stream."""
        stream, value = torch.cuda.current_stream(self.device).cuda_stream, self.turn
        pointers = self.pointers
        others = [r for r in range(self.ranks) if r != self.me]
        for r in others:
            _call("cuStreamWriteValue32_v2", stream, pointers[r] + 4 * self.me, value)
        for r in others:
            _call("cuStreamWaitValue32_v2", stream, pointers[self.me] + 4 * r, value)


def _call(name: str, stream: int, address: int, value: int) -> None:
    """Write, or wait until what stands there is `value` or later."""
    failed = getattr(_driver(), name)(stream, address, value & 0xFFFF_FFFF, 0)
    if failed:
        raise RuntimeError(f"{name} failed with CUDA error {failed}")


@lru_cache
def _driver() -> ctypes.CDLL:
    found = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        if hasattr(found, name):
            given = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
            getattr(found, name).argtypes = given
    found.cuMemcpy2DAsync_v2.argtypes = ctypes.POINTER(_Copy2D), ctypes.c_void_p
    return found


class Pull(Transport):
    """Cards of one host that reach each other."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def fetch(self, routes: Routes, parts: Parts) -> Arriving:
        """See `Transport`."""
        memory = routes.empty(parts)
        out = unstacked(memory, parts)
        laid = [(s.at, s.size) for s in routes.outgoing]
        wanted = [(s, [x[:, :, s.to : s.to + s.size] for x in memory]) for s in routes.incoming]
        self._pull(parts, routes, routes.held, laid, [(s.rank, s.at, to) for s, to in wanted])
        routes.copy_own(parts, out)
        return Arriving(out, self.memory.mark())

    def home(self, routes: Routes, parts: Parts) -> Returning:
        """See `Transport`."""
        came, begin, wanted = message(routes.outgoing, parts), 0, []
        for s in routes.outgoing:
            memory = []
            for shape in stacked(parts, s.size):
                count = math.prod(shape)
                memory.append(came[begin : begin + count].view(shape))
                begin += count
            wanted.append((s.rank, s.to, memory))
        laid = [(s.to, s.size) for s in routes.incoming]
        self._pull(parts, routes, routes.rows, laid, wanted)
        return Returning(routes, parts, self.memory.mark(), came)

    def _pull(
        self, parts: Parts, routes: Routes, rows: list[int], laid: list[tuple[int, int]],
        wanted: list[tuple[int, int, list[Tensor]]],
    ) -> None:  # fmt: skip
        """Lay rows of `parts` out, of `rows[me]` in all, and copy what is wanted: (rank, first row,
        where it goes). Every rank has `rows[r]` rows.

        A rank begins with the next one's rows: if all began with those of the first, they would
        share what its links give.
        """
        memory = self.memory
        each = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in parts) * parts[0].itemsize
        memory.reserve(each * max(rows))
        memory.begin()
        regions = self._regions(routes, parts, rows)
        mine = unstacked(regions[memory.me], parts)
        for span in _joined(laid):
            copy(rows_of(parts, *span), rows_of(mine, *span))
        after = lambda of: (of[0] - memory.me) % memory.ranks
        with memory.laid_out():
            for rank, first, to in sorted(wanted, key=after):
                for x, y in zip(regions[rank], to, strict=True):
                    copy_heads(x[:, :, first : first + y.shape[2]], y)
            for _, _, to in wanted[:1]:  # all of one tensor, or of two
                for y in to:
                    memory.keep(y)

    def _regions(self, routes: Routes, parts: Parts, rows: list[int]) -> list[list[Tensor]]:
        """The rows of every rank in the memory of this turn."""
        memory, dtype = self.memory, parts[0].dtype
        shapes = tuple([(*x.shape[:2], x.shape[3]) for x in parts])
        key = rows is routes.rows, memory.turn % 2, shapes, dtype
        # Of another memory, after `reserve`, they are of no use.
        found = routes.known.get(key, (None, []))
        if found[0] is not memory.own:
            made = [
                memory.of(r, memory.turn % 2, stacked(parts, n), dtype) for r, n in enumerate(rows)
            ]
            found = routes.known[key] = memory.own, made
        return found[1]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: pitched rows from one place to another."""

    _fields_ = (
        ("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p), ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p), ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p), ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p), ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


_LARGEST = (1 << 31) - 1  # bytes between the heads of one copy
_UNIFIED = 4  # the driver knows by the address whose memory it is


def copy_heads(x: Tensor, y: Tensor) -> None:
    """y becomes x, `(b, h, tokens, width)`, in the current stream, by one copy of b h pieces of
    memory: a copy engine's, where a kernel would read across cards."""
    b, h, tokens, width = x.shape
    if not x.numel():
        return
    each = [t.stride(1) * t.element_size() for t in (x, y)]
    whole = all(
        t.stride(3) == 1 and t.stride(2) == width and t.stride(0) == h * t.stride(1) for t in (x, y)
    )
    if not whole or x.device.type != "cuda":
        y.copy_(x)
        return
    if max(each) > _LARGEST:
        for n in range(b * h):
            y[n // h, n % h].copy_(x[n // h, n % h])
        return
    what = _Copy2D(
        0, 0, _UNIFIED, None, x.data_ptr(), None, each[0], 0, 0, _UNIFIED, None, y.data_ptr(), None,
        each[1], tokens * width * x.element_size(), b * h,
    )  # fmt: skip
    stream = torch.cuda.current_stream(y.device).cuda_stream
    failed = _driver().cuMemcpy2DAsync_v2(what, stream)
    if failed:
        raise RuntimeError(f"cuMemcpy2DAsync failed with CUDA error {failed}")


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows (first, size) in as few spans as may be."""
    found: list[tuple[int, int]] = []
    for first, size in sorted(spans):
        if found and first <= sum(found[-1]):
            before = found[-1][0]
            found[-1] = before, max(sum(found[-1]), first + size) - before
        else:
            found.append((first, size))
    return found


# -- which one -------------------------------------------------------------------------------------

_made: Cache[Transport | str] = Cache(64)


def transport_of(name: str, group: Any, device: torch.device) -> Transport:
    """The transport of that name; for "auto" pulls where all cards of the group are of one host and
    reach each other. All ranks find the same. While a CUDA graph is captured, collectives: the
    turns of pulls are counted on the host.

    **Raises:** `ArgumentError` for "pull" where that is impossible.
    """
    if name == "collective" or device.type != "cuda":
        found: Transport | str = Collective()
        if name == "pull":
            found = f"tensors are on {device.type}"
    elif torch.cuda.is_current_stream_capturing():
        found = "a CUDA graph is being captured" if name == "pull" else Collective()
    else:
        key = group, device
        known = _made.get(key)
        found = _made.put(key, _pull_of(group, device)) if known is None else known
        if name == "auto" and isinstance(found, str):
            found = Collective()
    if isinstance(found, str):
        raise ArgumentError(
            f'transport="pull" is not possible here: {found}; use "collective", or "auto"'
        )
    return found


def told(name: str, group: Any, device: torch.device) -> str:
    """How rows travel, for people to read; nothing is found out for it.

    - `group`: None where there is none yet.
    """
    if device.type != "cuda":
        return f"collectives, tensors are on {device.type}"
    if name == "collective":
        return "collectives, as named"
    known = None if group is None else _made.get((group, device))
    if isinstance(known, str):
        return f"collectives: {known}"
    if known is not None:
        return "pulled by copy engines"
    return "pulled by copy engines, if the group's cards are of one host and reach each other"


def reserved() -> int:
    """Bytes of symmetric memory of this process, which PyTorch's allocator does not count."""
    made = [x.memory for x in _made.values() if isinstance(x, Pull)]
    return sum(memory.own.numel() for memory in made)


def _pull_of(group: Any, device: torch.device) -> Transport | str:
    """Pulls, or why there are none; all ranks ask at once, and answer alike."""
    why = _why_not(group, device)
    if why:
        return why
    try:
        memory = Memory(group, device)
        together(lambda: _try_out(memory), group, device)
    except RuntimeError as error:  # on all ranks
        return f"symmetric memory does not work on every rank ({str(error).partition(chr(10))[0]})"
    return Pull(memory)


def _try_out(memory: Memory) -> None:
    """Read a number of every rank. RuntimeError where it is another one."""
    shape, region = (1, 2, 8, 16), memory.turn % 2
    of = lambda rank: memory.of(rank, region, [shape], torch.float32)[0]
    memory.begin()
    of(memory.me).fill_(memory.me)
    found = [
        torch.full(shape, -1.0, dtype=torch.float32, device=memory.device)
        for _ in range(memory.ranks)
    ]
    with memory.laid_out():
        for r, y in enumerate(found):
            copy_heads(of(r), y)
    memory.mark()()
    read = [y.unique().tolist() for y in found]
    if read != [[float(r)] for r in range(memory.ranks)]:
        raise RuntimeError(f"what was read of the ranks is {read}")


def together(make: Callable[[], T], group: Any, device: torch.device) -> T:
    """What `make` returns.

    **Raises:** `RuntimeError` on every rank, where it fails on one.
    """
    made, error = None, None
    try:
        made = make()
    except RuntimeError as failed:
        error = failed
    fine = torch.tensor([int(error is None)], device=device)
    dist.all_reduce(fine, dist.ReduceOp.MIN, group=group)
    if not bool(fine):
        raise error or RuntimeError("it failed on another rank")
    return made  # type: ignore[bad-return]


def _why_not(group: Any, device: torch.device) -> str:
    """Of one host, and every card reaches every other; each is of one rank."""
    import hashlib
    import socket

    try:
        from torch.distributed import _symmetric_memory as symmetric

        fine = hasattr(symmetric, "rendezvous") and hasattr(_driver(), "cuStreamWaitValue32_v2")
    except (ImportError, OSError):
        fine = False
    index = torch.cuda.current_device() if device.index is None else device.index
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest()
    card = hashlib.blake2b(
        str(torch.cuda.get_device_properties(index).uuid).encode(), digest_size=7
    ).digest()
    number = lambda x: int.from_bytes(x, "little")
    seen = torch.cuda.device_count()
    reaches = all(torch.cuda.can_device_access_peer(index, n) for n in range(seen) if n != index)
    mine = torch.tensor(
        [int(fine and reaches), number(host), number(card)], dtype=torch.int64, device=device
    )
    every = mine.new_empty(3 * dist.get_world_size(group))
    all_gather(every, mine, group=group)
    found = every.view(-1, 3).tolist()
    if len({row[1] for row in found}) > 1:
        return "the ranks are on several hosts"
    if len({row[2] for row in found}) < len(found):
        return "ranks share a card"
    if not all(row[0] for row in found):
        return "cards do not reach each other, or PyTorch has no symmetric memory"
    return ""
