"""Comparison of one number per rank in memory that all processes of a host share.

A comparison by messages takes the host as long as some kernels take, since threads have to wake
each other up. Here each rank writes one number and reads those of the others.

A slot holds a rank's turn and its number in 64 bits, which are written at once. Every rank has
several slots, used in turns. A rank takes its next turn when it has read everybody's slot, so no
slot is overwritten before all have read it. A rank that has left has lost its lock on the file.
"""

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_MEMORY = "/dev/shm"
_SLOTS = 8  # of a rank
_NUMBER_BITS = 40  # the other bits of a slot are the turn's
_NUMBER_MASK, _TURN_MASK = (1 << _NUMBER_BITS) - 1, (1 << 24) - 1
_SPIN_SECONDS = 1e-3  # before a rank sleeps, which takes 50 us and more
_CHECK_SECONDS = 0.1  # between checks that the others are still there
Report = Callable[[Callable[[], str]], None]
_yield_processor = getattr(os, "sched_yield", lambda: None)


class RankLeft(RuntimeError):
    """A rank has ended, or has made no call in the group's time."""


class SharedMemoryCompare:
    """The slots of all ranks.

    - `path`: a file of `size(ranks)` bytes, all 0, the same on all ranks.
    - `timeout`: seconds to wait for others.
    - `failures`: a number of every rank, for calls that it fails in.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout: float) -> None:
        import fcntl

        self.rank, self.ranks, self.timeout, self.turn = rank, ranks, timeout, 0
        self.file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self.file)
        memory = memoryview(mmap.mmap(self.file, SharedMemoryCompare.size(ranks))).cast("Q")
        self.processes, self.failures = memory[:ranks], memory[ranks : 2 * ranks]
        self.slots = memory[2 * ranks :]
        self.processes[rank] = os.getpid()
        fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @staticmethod
    def size(ranks: int) -> int:
        """Return the bytes of the file."""
        return 8 * (_SLOTS + 2) * ranks

    def write(self, number: int) -> None:
        """Write this rank's number for the next turn; its low bits count."""
        self.turn += 1
        slot = self.turn % _SLOTS * self.ranks + self.rank
        self.slots[slot] = (self.turn & _TURN_MASK) << _NUMBER_BITS | number & _NUMBER_MASK

    def complete(self) -> bool:
        """Return whether all ranks have written for this turn."""
        turn = self.turn & _TURN_MASK
        return all(slot >> _NUMBER_BITS == turn for slot in self._turn_slots())

    def all_equal(self, report: Report = lambda whom: None) -> bool:
        """Wait until all ranks have written for this turn; return whether their numbers are equal.

        - `report`: is called now and then meanwhile, with a function that names the late ranks.

        **Raises:** `RankLeft` where one has left or does not write in time; as `report`.
        """
        slots = self._turn_slots()
        local_slot, turn = slots[self.rank], self.turn & _TURN_MASK
        equal = True
        for rank in range(self.ranks):
            if slots[rank] >> _NUMBER_BITS != turn:
                self._wait_for(slots, rank, turn, report)
            equal = equal and slots[rank] == local_slot
        return equal

    def numbers(self) -> list[int]:
        """Return the numbers of all ranks for this turn."""
        return [slot & _NUMBER_MASK for slot in self._turn_slots()]

    def _turn_slots(self) -> memoryview:
        first = self.turn % _SLOTS * self.ranks
        return self.slots[first : first + self.ranks]

    def _wait_for(self, slots: memoryview, rank: int, turn: int, report: Report) -> None:
        """Wait until a rank has written. Spin at first: it is about to, and a rank that sleeps
        wakes up late."""
        start = last_check = time.monotonic()
        is_late = lambda rank: slots[rank] >> _NUMBER_BITS != turn
        while is_late(rank):
            now = time.monotonic()
            if now - start < _SPIN_SECONDS:
                _yield_processor()
                continue
            report(lambda: rank_names(filter(is_late, range(self.ranks))))
            time.sleep(0 if now - start < _CHECK_SECONDS else 1e-3)
            if now - last_check > _CHECK_SECONDS:
                last_check = now
                # Read the slot once more: the rank may have written before it left.
                if self._has_left(rank) and is_late(rank):
                    raise RankLeft(f"rank {rank} has left, and this rank waits for its call")
                if now - start > self.timeout:
                    raise RankLeft(f"rank {rank} made no call in {self.timeout:.0f} s")

    def left(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        return [rank for rank in range(self.ranks) if self._has_left(rank)]

    def _has_left(self, rank: int) -> bool:
        """Return whether a rank's process has ended, which releases its lock. A rank that is a
        thread of this process has not."""
        import fcntl

        if self.processes[rank] == os.getpid():
            return False
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, rank)
        return True


def rank_names(ranks: Iterable[int]) -> str:
    """Return the words for some ranks."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def shared_memory_compare(group: Any, timeout: float) -> SharedMemoryCompare | None:
    """Return a comparison of all ranks of a group with collectives on the CPU, which all call this.
    None where they do not see each other's files, or files have no locks."""
    compare: SharedMemoryCompare | None = None
    with _new_file(group) as path:
        with suppress(ImportError, OSError):
            compare = SharedMemoryCompare(path, group.rank(), group.size(), timeout)
            compare.write(0)
        everywhere = _on_all(compare is not None, group)
    # Several hosts may share a file in name alone: what others wrote is visible at once, or never.
    visible = everywhere and compare is not None and compare.complete()
    return compare if _on_all(visible, group) else None


def _on_all(flag: bool, group: Any) -> bool:
    flags = torch.tensor(int(flag), device="cpu")
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
    return bool(flags)


@contextmanager
def _new_file(group: Any) -> Iterator[str]:
    """Yield the name of a new file that the first rank makes; if it cannot, a name without a file.
    Afterwards the file has no name: it ends with the last process that uses it."""
    path = [tempfile.gettempdir() + "/headway-none"]
    try:
        if group.rank() == 0:
            _remove_abandoned()
            with suppress(OSError):
                folder = _MEMORY if os.access(_MEMORY, os.W_OK) else None
                file, path[0] = tempfile.mkstemp(prefix=f"headway-{os.getpid()}-", dir=folder)
                os.truncate(file, SharedMemoryCompare.size(group.size()))
                os.close(file)
        dist.broadcast_object_list(path, group=group, device=torch.device("cpu"), group_src=0)
        yield path[0]
    finally:
        if group.rank() == 0:
            Path(path[0]).unlink(missing_ok=True)


def _remove_abandoned() -> None:
    """Remove the files of processes that were killed before they could."""
    for file in Path(_MEMORY).glob("headway-*-*"):
        if not Path("/proc", file.name.split("-")[1]).exists():
            with suppress(OSError):
                file.unlink()
