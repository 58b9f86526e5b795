"""Memory that all cards of a group see, and copies between them by copy engines.

Ranks meet in a stream: to say a turn is a write into the flags of every other rank, to wait for all
is a wait for theirs. Both are operations of streams (`cuStreamWriteValue32`), not kernels, which a
persistent kernel would not let in.
"""

import ctypes
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
REGIONS = 4
_FLAGS = 4096  # bytes in front of the regions: a uint32 of every rank
_GRAIN = 1 << 21  # memory grows by multiples of this


class Memory:
    """Symmetric memory of a group: as much on every rank, which all of them see.

    - `turn`: how often something was laid out, which ranks say; region `turn % REGIONS` is next.
    - `members`: the group's ranks, by their numbers in the whole.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.me, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.members = frozenset(dist.get_process_group_ranks(group))
        self.turn, self.capacity = 0, 0
        self.copies = torch.cuda.Stream(device)
        self.index = self.copies.device_index
        self.laid = torch.cuda.Event()  # when rows were laid out
        self.passed = [torch.cuda.Event() for _ in range(REGIONS)]  # when all ranks said a turn
        for event in (self.laid, *self.passed):
            event.record(self.copies)  # which makes it
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
        made = symmetric.empty(_FLAGS + REGIONS * capacity, dtype=torch.uint8, device=self.device)
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
        """Before something is laid out in the current stream: its region has been read. What was
        laid there was read before its ranks said the turn after."""
        _wait(self._here(), self.passed[(self.turn + 2) % REGIONS])

    def exchange(self, copies: list["Copy"], to: list[Tensor]) -> None:
        """Say that everything is laid out, and when all ranks have said so, copy; in the stream of
        copies, which the current stream does not wait for."""
        self.turn += 1
        _record(self.laid, self._here())
        _wait(self.copies.cuda_stream, self.laid)
        self.meet()
        self.passed[self.turn % REGIONS].record(self.copies)
        targets, stream = [y.data_ptr() for y in to], self.copies.cuda_stream
        for x in copies:
            _copy(x, targets[x.target], stream)
        for y in to:  # if nobody waits for it, it is not given to others before
            y.record_stream(self.copies)

    def mark(self) -> Callable[[], None]:
        """What makes the then current stream, when called, wait for the copies until now, and for
        what the stream that is current now has until now."""
        copied, done = torch.cuda.Event(), torch.cuda.Event()
        copied.record(self.copies)
        done.record()
        here = self._here()

        def wait() -> None:
            then = self._here()
            _wait(then, copied)
            if then != here:
                _wait(then, done)

        return wait

    def _here(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.index)

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

    def restart(self) -> None:
        """Begin anew, when all have let go."""
        self.own[:_FLAGS].zero_()
        self.turn = 0
        torch.cuda.synchronize(self.device)


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


# -- the driver, which takes the host less time than PyTorch's objects --------------------------


def _record(event: torch.cuda.Event, stream: int) -> None:
    _checked("cuEventRecord", event.cuda_event, stream)


def _wait(stream: int, event: torch.cuda.Event) -> None:
    """A stream waits for what an event has recorded last."""
    _checked("cuStreamWaitEvent", stream, event.cuda_event, 0)


def _call(name: str, stream: int, address: int, value: int) -> None:
    """Write, or wait until what stands there is `value` or later."""
    _checked(name, stream, address, value & 0xFFFF_FFFF, 0)


def _checked(name: str, *given: int) -> None:
    failed = getattr(driver(), name)(*given)
    if failed:
        raise RuntimeError(f"{name} failed with CUDA error {failed}")


@lru_cache
def driver() -> ctypes.CDLL:
    """CUDA's. OSError where there is none."""
    found = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        if hasattr(found, name):
            given = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
            getattr(found, name).argtypes = given
    found.cuEventRecord.argtypes = ctypes.c_void_p, ctypes.c_void_p
    found.cuStreamWaitEvent.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint
    found.cuMemcpy2DAsync_v2.argtypes = ctypes.POINTER(_Copy2D), ctypes.c_void_p
    return found


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
    failed = driver().cuMemcpy2DAsync_v2(what, stream)
    if failed:
        raise RuntimeError(f"cuMemcpy2DAsync failed with CUDA error {failed}")


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
