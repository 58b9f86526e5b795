"""Memory that all GPUs of a group can read, and copies between them by copy engines.

Ranks synchronise in streams: to signal a turn is to write it into a flag of every other rank, to
wait for all ranks is to wait for theirs. Both are stream operations (`cuStreamWriteValue32`), not
kernels, which could not start beside a persistent kernel.
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
_FLAG_BYTES = 4096  # in front of the regions: a uint32 of every rank
_GRAIN = 1 << 21  # memory grows by multiples of this


class SymmetricMemory:
    """Symmetric memory of a group: every rank has as much, and can read all of it.

    - `turn`: how many exchanges ranks have signalled; region `turn % REGIONS` is next.
    - `members`: the group's ranks, by their numbers in the whole world.
    - `local`: this rank's memory; `capacity`: bytes of a region.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.members = frozenset(dist.get_process_group_ranks(group))
        self.turn, self.capacity = 0, 0
        self.copy_stream = torch.cuda.Stream(device)
        self.device_index = self.copy_stream.device_index
        self.laid_out = torch.cuda.Event()
        self.signalled = [torch.cuda.Event() for _ in range(REGIONS)]  # a turn, by all ranks
        for event in (self.laid_out, *self.signalled):
            event.record(self.copy_stream)  # creates the event
        self.reserve(1)

    def reserve(self, size: int) -> None:
        """Make room for `size` bytes in each region. All ranks call it with the same size."""
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)  # nobody reads the old memory any more
        # A quarter more than before, so that varying lengths soon reserve no new memory.
        capacity = -(-max(size, self.capacity * 5 // 4) // _GRAIN) * _GRAIN
        memory = on_all_ranks(lambda: self._empty(symmetric, capacity), self.group, self.device)
        handle = on_all_ranks(
            lambda: symmetric.rendezvous(memory, self.group), self.group, self.device
        )  # all flags are 0 by then
        self.local, self.handle, self.capacity, self.turn = memory, handle, capacity, 0
        self.pointers = list(handle.buffer_ptrs)

    def _empty(self, symmetric: Any, capacity: int) -> Tensor:
        size = _FLAG_BYTES + REGIONS * capacity
        memory = symmetric.empty(size, dtype=torch.uint8, device=self.device)
        memory[:_FLAG_BYTES].zero_()
        return memory

    def tensors(
        self, rank: int, region: int, shapes: list[tuple], dtype: torch.dtype
    ) -> list[Tensor]:
        """Return tensors that lie one after the other in a region of a rank's memory."""
        offset, tensors = (_FLAG_BYTES + region * self.capacity) // dtype.itemsize, []
        for shape in shapes:
            tensors.append(self.handle.get_buffer(rank, shape, dtype, offset))
            offset += tensors[-1].numel()
        return tensors

    def wait_for_region(self) -> None:
        """Make the current stream wait until the next region has been read by all ranks. They read
        its rows before they signalled the turn after."""
        _wait_event(self._current_stream(), self.signalled[(self.turn + 2) % REGIONS])

    def exchange(self, pulls: list["StridedCopy"], targets: list[Tensor]) -> None:
        """Signal that all rows are laid out, and copy when all ranks have signalled; in the copy
        stream, which the current stream does not wait for."""
        self.turn += 1
        _record(self.laid_out, self._current_stream())
        _wait_event(self.copy_stream.cuda_stream, self.laid_out)
        self.signal_and_wait()
        self.signalled[self.turn % REGIONS].record(self.copy_stream)
        addresses, stream = [y.data_ptr() for y in targets], self.copy_stream.cuda_stream
        for pull in pulls:
            _copy(pull, addresses[pull.target], stream)
        for target in targets:  # even if nobody waits, its memory is not reused before
            target.record_stream(self.copy_stream)

    def wait_function(self) -> Callable[[], None]:
        """Return a function that makes its caller's stream wait for the copies until now, and for
        the work until now in the stream that is current now."""
        copied, worked = torch.cuda.Event(), torch.cuda.Event()
        copied.record(self.copy_stream)
        worked.record()
        this_stream = self._current_stream()

        def wait() -> None:
            stream = self._current_stream()
            _wait_event(stream, copied)
            if stream != this_stream:
                _wait_event(stream, worked)

        return wait

    def _current_stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self.device_index)

    def signal_and_wait(self) -> None:
        """Signal this turn to all ranks and wait for theirs, in the copy stream."""
        stream, pointers = self.copy_stream.cuda_stream, self.pointers
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        for peer in peers:
            flag = pointers[peer] + 4 * self.rank
            _flag_operation("cuStreamWriteValue32_v2", stream, flag, self.turn)
        for peer in peers:
            flag = pointers[self.rank] + 4 * peer
            _flag_operation("cuStreamWaitValue32_v2", stream, flag, self.turn)

    def release(self) -> None:
        """Release the streams that wait for ranks which will never signal: this rank writes their
        flags itself, until nothing waits."""
        side_stream = torch.cuda.Stream(self.device).cuda_stream
        copied = torch.cuda.Event()
        copied.record(self.copy_stream)
        while not copied.query():
            for peer in range(self.ranks):  # repeatedly: late ranks still write older turns
                flag = self.pointers[self.rank] + 4 * peer
                _flag_operation("cuStreamWriteValue32_v2", side_stream, flag, self.turn)
            time.sleep(1e-3)
        torch.cuda.synchronize(self.device)

    def restart(self) -> None:
        """Reset flags and turns, after all ranks have released theirs."""
        self.local[:_FLAG_BYTES].zero_()
        self.turn = 0
        torch.cuda.synchronize(self.device)


class StridedCopy(NamedTuple):
    """A copy of `height` pieces of memory, each of `width` bytes.

    - `source`: the first address; `source_pitch`: bytes from one piece to the next.
    - `target`: number of a call's tensor; `offset`: its first byte that is written.
    """

    source: int
    source_pitch: int
    target: int
    offset: int
    target_pitch: int
    width: int
    height: int

    @staticmethod
    def of(x: Tensor, target: int, view: Tensor, offset: int) -> "StridedCopy":
        """Return the copy of x (b, h, tokens, width), whose memory stays, into a view of the
        target, of the same shape."""
        for t in (x, view):
            assert t.stride()[2:] == (t.shape[3], 1), t.stride()
            assert t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1), t.stride()
        (b, h, tokens, width), itemsize = x.shape, x.element_size()
        source_pitch, target_pitch = x.stride(1) * itemsize, view.stride(1) * itemsize
        return StridedCopy(
            x.data_ptr(), source_pitch, target, offset, target_pitch, tokens * width * itemsize,
            b * h,
        )  # fmt: skip


# -- the driver, whose calls take the host less time than PyTorch's objects ------------------------


def _record(event: torch.cuda.Event, stream: int) -> None:
    _call_driver("cuEventRecord", event.cuda_event, stream)


def _wait_event(stream: int, event: torch.cuda.Event) -> None:
    """Make a stream wait for what an event recorded last."""
    _call_driver("cuStreamWaitEvent", stream, event.cuda_event, 0)


def _flag_operation(name: str, stream: int, address: int, value: int) -> None:
    """Write a flag, or wait until it holds `value` or a later turn."""
    _call_driver(name, stream, address, value & 0xFFFF_FFFF, 0)


def _call_driver(name: str, *arguments: int) -> None:
    error = getattr(driver(), name)(*arguments)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")


@lru_cache
def driver() -> ctypes.CDLL:
    """Load the CUDA driver; OSError where there is none."""
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        if hasattr(library, name):
            types = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
            getattr(library, name).argtypes = types
    library.cuEventRecord.argtypes = ctypes.c_void_p, ctypes.c_void_p
    library.cuStreamWaitEvent.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint
    library.cuMemcpy2DAsync_v2.argtypes = ctypes.POINTER(_Copy2D), ctypes.c_void_p
    return library


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: a copy of pitched rows."""

    _fields_ = (
        ("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p), ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p), ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p), ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p), ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


_UNIFIED = 4  # the driver derives from an address whose memory it is
_LARGEST_PITCH = (1 << 31) - 1  # bytes


def _copy(copy: StridedCopy, target: int, stream: int) -> None:
    """Copy by a copy engine, where a kernel would read across GPUs."""
    target += copy.offset
    if max(copy.source_pitch, copy.target_pitch) > _LARGEST_PITCH:
        for n in range(copy.height):
            source = copy.source + n * copy.source_pitch
            one_piece = copy._replace(source=source, source_pitch=copy.width, offset=0,
                                      target_pitch=copy.width, height=1)  # fmt: skip
            _copy(one_piece, target + n * copy.target_pitch, stream)
        return
    arguments = _Copy2D(
        0, 0, _UNIFIED, None, copy.source, None, copy.source_pitch, 0, 0, _UNIFIED, None, target,
        None, copy.target_pitch, copy.width, copy.height,
    )  # fmt: skip
    error = driver().cuMemcpy2DAsync_v2(arguments, stream)
    if error:
        raise RuntimeError(f"cuMemcpy2DAsync failed with CUDA error {error}")


def on_all_ranks(make: Callable[[], T], group: Any, device: torch.device) -> T:
    """Return the result of `make`.

    **Raises:** `RuntimeError` on every rank, where it fails on one.
    """
    result, error = None, None
    try:
        result = make()
    except RuntimeError as failure:
        error = failure
    succeeded = torch.tensor([int(error is None)], device=device)
    dist.all_reduce(succeeded, dist.ReduceOp.MIN, group=group)
    if not bool(succeeded):
        raise error or RuntimeError("it failed on another rank")
    return result  # type: ignore[bad-return]
