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

A call runs ahead of the agreement that all ranks make it (`agreement.py`): a comparison takes the
host as long as some kernels take. Where ranks turn out not to agree, or one has left, each lets go
of its waits (`Memory.let_go`) and raises. A rank that leaves in a backward makes the others wait in
their streams, until the time limit of a later collective.
"""

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...caches import Cache
from ...errors import ArgumentError
from .agreement import Agreement
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

    def exchange(self, copies: list["Copy"], to: list[Tensor]) -> None:
        """Say that everything is laid out, and when all ranks have said so, copy; in the stream of
        copies, which the current stream does not wait for."""
        self.turn += 1
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        self.meet()
        self.passed.record(self.copies)
        targets, stream = [y.data_ptr() for y in to], self.copies.cuda_stream
        for x in copies:
            _copy(x, targets[x.target], stream)
        for y in to:  # if nobody waits for it, it is not given to others before
            y.record_stream(self.copies)

    def mark(self) -> Callable[[], None]:
        """What makes the current stream, when called, wait for the copies until now."""
        event = torch.cuda.Event()
        event.record(self.copies)
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def meet(self) -> None:
        """Say this turn to all ranks, and wait until all have, in the stream of copies."""
        stream, pointers = self.copies.cuda_stream, self.pointers
        others = [r for r in range(self.ranks) if r != self.me]
        for r in others:
            _call("cuStreamWriteValue32_v2", stream, pointers[r] + 4 * self.me, self.turn)
        for r in others:
            _call("cuStreamWaitValue32_v2", stream, pointers[self.me] + 4 * r, self.turn)

    def let_go(self) -> None:
        """Of a call that others have left, and who will never say what this rank waits for: it says
        that to itself, until nothing waits."""
        aside = torch.cuda.Stream(self.device).cuda_stream
        done = torch.cuda.Event()
        done.record(self.copies)
        while not done.query():
            for r in range(self.ranks):  # again and again: late ones still say older turns
                _call("cuStreamWriteValue32_v2", aside, self.pointers[self.me] + 4 * r, self.turn)
            time.sleep(1e-3)
        torch.cuda.synchronize(self.device)

    def restart(self, group: Any) -> None:
        """Begin anew, when all have let go. All ranks call this.

        - `group`: of the same ranks, for barriers on the host.
        """
        dist.barrier(group)  # nobody writes flags any more
        self.own[:_FLAGS].zero_()
        self.turn = 0
        torch.cuda.synchronize(self.device)
        dist.barrier(group)


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


class Copy(NamedTuple):
    """`height` pieces of memory, each of `width` bytes and `pitch` bytes from the next: from the
    address `source` on, to byte `at` of a call's tensor number `target`."""

    source: int
    source_pitch: int
    target: int
    at: int
    target_pitch: int
    width: int
    height: int

    @staticmethod
    def of(x: Tensor, target: int, y: Tensor, at: int) -> "Copy":
        """Of x, (b, h, tokens, width), which stays where it is, into y, as large."""
        for t in (x, y):
            assert t.stride()[2:] == (t.shape[3], 1), t.stride()
            assert t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1), t.stride()
        (b, h, tokens, width), e = x.shape, x.element_size()
        pitches = x.stride(1) * e, y.stride(1) * e
        return Copy(
            x.data_ptr(), pitches[0], target, at, pitches[1], tokens * width * e, b * h
        )  # fmt: skip


class _Exchange(NamedTuple):
    """An exchange of tensors of one kind, as worked out for the memory that `own` is of.

    - `spans`: of rows to be laid out in `mine`; `copies`: of what others have laid out.
    """

    own: Tensor
    spans: list[tuple[int, int]]
    mine: Parts
    copies: list[Copy]


class Pull(Transport):
    """Cards of one host that reach each other.

    - `agreement`: of a call that does not wait for it (`Transport.ahead_of`).
    """

    def __init__(self, memory: Any, agreement: Agreement | None = None) -> None:
        self.memory, self.agreement = memory, agreement

    def ahead_of(self, agreement: Agreement) -> Transport:
        """See `Transport`. Copies stay inside of the memory, whatever other ranks do."""
        return Pull(self.memory, agreement)

    def fetch(self, routes: Routes, parts: Parts) -> Arriving:
        """See `Transport`."""
        to = routes.empty(parts)

        def targets() -> Iterator[_Target]:
            for s in routes.incoming:
                for n, y in enumerate(to):
                    yield _Target(s.rank, s.at, n, n, y[:, :, s.to : s.to + s.size])

        laid = [(s.at, s.size) for s in routes.outgoing]
        self._pull(routes, routes.held, parts, laid, to, targets)
        out = unstacked(to, parts)
        routes.copy_own(parts, out)
        return Arriving(out, self.memory.mark())

    def home(self, routes: Routes, parts: Parts) -> Returning:
        """See `Transport`."""
        came = message(routes.outgoing, parts)

        def targets() -> Iterator[_Target]:
            begin = 0
            for s in routes.outgoing:
                for n, shape in enumerate(stacked(parts, s.size)):
                    size = math.prod(shape)
                    yield _Target(s.rank, s.to, n, 0, came[begin : begin + size].view(shape))
                    begin += size

        laid = [(s.to, s.size) for s in routes.incoming]
        self._pull(routes, routes.rows, parts, laid, [came], targets)
        return Returning(routes, parts, self.memory.mark(), came)

    def _pull(
        self, routes: Routes, rows: list[int], parts: Parts, laid: list[tuple[int, int]],
        to: list[Tensor], targets: Callable[[], Iterable["_Target"]],
    ) -> None:  # fmt: skip
        """Lay rows of `parts` out and copy into `to` what others have.

        - `rows`: that every rank's parts have; `laid`: which of them are laid out, (first, size).
        """
        memory, dtype = self.memory, parts[0].dtype
        each = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in parts) * dtype.itemsize
        if memory.capacity < each * max(rows):
            if self.agreement is not None:
                self.agreement.wait()  # all ranks make new memory, or none
            memory.reserve(each * max(rows))
        memory.begin()
        shapes = tuple([(*x.shape[:2], x.shape[3]) for x in parts])
        key = rows is routes.rows, memory.turn % 2, shapes, dtype
        found = routes.known.get(key)
        if found is None or found.own is not memory.own:
            found = routes.known[key] = self._prepared(rows, parts, laid, to, targets())
        for span in found.spans:
            copy(rows_of(parts, *span), rows_of(found.mine, *span))
        memory.exchange(found.copies, to)

    def _prepared(
        self, rows: list[int], parts: Parts, laid: list[tuple[int, int]], to: list[Tensor],
        targets: Iterable["_Target"],
    ) -> _Exchange:  # fmt: skip
        """The exchange of a turn. A rank begins with the next one's rows: if all began with those
        of the first, they would share what its links give."""
        memory, dtype = self.memory, parts[0].dtype
        regions = [
            memory.of(r, memory.turn % 2, stacked(parts, n), dtype) for r, n in enumerate(rows)
        ]
        copies = []
        for t in sorted(targets, key=lambda t: (t.rank - memory.me) % memory.ranks):
            x = regions[t.rank][t.part][:, :, t.first : t.first + t.y.shape[2]]
            if x.numel():
                copies.append(Copy.of(x, t.to, t.y, t.y.data_ptr() - to[t.to].data_ptr()))
        return _Exchange(memory.own, _joined(laid), unstacked(regions[memory.me], parts), copies)


class _Target(NamedTuple):
    """Where rows go: from a rank's row `first` on, of its memory's tensor number `part`, into `y`,
    a view of a call's tensor number `to`."""

    rank: int
    first: int
    part: int
    to: int
    y: Tensor


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


_UNIFIED = 4  # the driver knows by the address whose memory it is
_LARGEST = (1 << 31) - 1  # bytes of a pitch


def _copy(x: Copy, target: int, stream: int) -> None:
    """Copy by a copy engine, where a kernel would read across cards."""
    target += x.at
    if max(x.source_pitch, x.target_pitch) > _LARGEST:
        for n in range(x.height):
            line = x._replace(source=x.source + n * x.source_pitch, source_pitch=x.width, at=0,
                              target_pitch=x.width, height=1)  # fmt: skip
            _copy(line, target + n * x.target_pitch, stream)
        return
    what = _Copy2D(
        0, 0, _UNIFIED, None, x.source, None, x.source_pitch, 0, 0, _UNIFIED, None, target, None,
        x.target_pitch, x.width, x.height,
    )  # fmt: skip
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


def transport_of(
    name: str, group: Any, device: torch.device, agreement: Agreement | None
) -> Transport:
    """The transport of that name; for "auto" pulls where all cards of the group are of one host and
    reach each other. All ranks find the same. While a CUDA graph is captured, collectives: the
    turns of pulls are counted on the host.

    - `agreement`: of the call; None where ranks have agreed.

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
        if known is None and agreement is not None:
            agreement.wait()  # what is possible ranks find out together
        found = _made.put(key, _pull_of(group, device)) if known is None else known
        if name == "auto" and isinstance(found, str):
            found = Collective()
    if isinstance(found, str):
        raise ArgumentError(
            f'transport="pull" is not possible here: {found}; use "collective", or "auto"'
        )
    return found if agreement is None else found.ahead_of(agreement)


def abandon(group: Any, device: torch.device, agreement: Agreement, anew: bool) -> None:
    """Let go of a call that some ranks have begun and others have not, whatever transport each of
    them had in mind.

    - `anew`: all ranks call this, and will make other calls.
    """
    pull = _made.get((group, device))
    if isinstance(pull, Pull):
        pull.memory.let_go()
        if anew:
            pull.memory.restart(agreement.group)


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
    found = torch.full(
        (memory.ranks, *shape), -1.0, dtype=torch.float32, device=memory.device
    )  # fmt: skip
    at = lambda r: found[r].data_ptr() - found.data_ptr()
    memory.exchange([Copy.of(of(r), 0, found[r], at(r)) for r in range(memory.ranks)], [found])
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
