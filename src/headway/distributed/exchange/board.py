"""What ranks of one host are about to do, in memory that all of them see.

A comparison of ranks by messages takes the host as long as some kernels take: threads wake each
other up. Here each rank writes one number and reads those of the others.

A word is a rank's turn and its number in 64 bits, which are written at once. There are several
words of a rank, in turns: nobody writes a word again before all have read it, since a rank goes on
to the next turn when it has seen everybody's. A rank that has left has lost its lock on the file.
"""

import mmap
import os
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_WORDS = 8  # of a rank
_BITS = 40  # of a number; the others are the turn's
_NUMBER, _TURN = (1 << _BITS) - 1, (1 << 24) - 1
_AWAKE = 1e-3  # seconds that a rank does not sleep: that takes 50 us and more
_PATIENCE = 0.1  # seconds after which a rank asks whether the others are there
_let_others_run = getattr(os, "sched_yield", lambda: None)


class Board:
    """The words of all ranks.

    - `path`: a file of `size(ranks)` bytes, all 0, the same on all ranks.
    - `timeout`: seconds to wait for others.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout: float) -> None:
        import fcntl

        self.rank, self.ranks, self.timeout, self.turn = rank, ranks, timeout, 0
        self.file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self.file)
        everything = memoryview(mmap.mmap(self.file, Board.size(ranks))).cast("Q")
        self.processes, self.words = everything[:ranks], everything[ranks:]
        self.processes[rank] = os.getpid()
        fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of a board's file."""
        return 8 * (_WORDS + 1) * ranks

    def say(self, number: int) -> None:
        """Write this rank's number, of which some bits count, for the next turn."""
        self.turn += 1
        at = self.turn % _WORDS * self.ranks + self.rank
        self.words[at] = (self.turn & _TURN) << _BITS | number & _NUMBER

    def complete(self) -> bool:
        """Whether all ranks have written for this turn."""
        return all(word >> _BITS == self.turn & _TURN for word in self._row())

    def alike(self) -> bool:
        """Whether all ranks have written the same number for this turn, when all have written.

        **Raises:** `RuntimeError` where one has left or does not write in time.
        """
        row = self._row()
        mine, turn = row[self.rank], self.turn & _TURN
        same = True
        for r in range(self.ranks):
            if row[r] >> _BITS != turn:
                self._wait(row, r, turn)
            same = same and row[r] == mine
        return same

    def _row(self) -> memoryview:
        first = self.turn % _WORDS * self.ranks
        return self.words[first : first + self.ranks]

    def _wait(self, row: memoryview, r: int, turn: int) -> None:
        """Until rank r has written, which it is about to do: a rank that sleeps wakes up late."""
        began = asked = time.monotonic()
        while row[r] >> _BITS != turn:
            now = time.monotonic()
            if now - began < _AWAKE:
                _let_others_run()
                continue
            time.sleep(0 if now - began < _PATIENCE else 1e-3)
            if now - asked > _PATIENCE:
                asked = now
                # Once more: it may have written and left.
                if self._left(r) and row[r] >> _BITS != turn:
                    raise RuntimeError(f"rank {r} has left, and this rank waits for its call")
                if now - began > self.timeout:
                    raise RuntimeError(f"rank {r} made no call in {self.timeout:.0f} s")

    def _left(self, r: int) -> bool:
        """Whether rank r has let go of its lock, as processes that end do; one that is a thread of
        this process is here."""
        import fcntl

        if self.processes[r] == os.getpid():
            return False
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, r)
        except OSError:
            return False
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, r)
        return True


def board_of(group: Any, timeout: float) -> Board | None:
    """A board of all ranks of a group with collectives on the CPU, which all call this; None where
    they do not see each other's files, or files have no locks."""
    found: Board | None = None
    path = _made(group)
    with suppress(ImportError, OSError):
        found = Board(path, group.rank(), group.size(), timeout)
        found.say(0)
    everywhere = _on_all(found is not None, group)  # and nobody needs the name any more
    if group.rank() == 0:
        Path(path).unlink(missing_ok=True)
    # A file of several hosts may be one in name alone: what they write is there at once, or never.
    seen = everywhere and found is not None and found.complete()
    return found if _on_all(seen, group) else None


def _on_all(flag: bool, group: Any) -> bool:
    found = torch.tensor(int(flag), device="cpu")
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return bool(found)


def _made(group: Any) -> str:
    """The name of a new file that the first rank makes; where it cannot, one that nothing has."""
    name = [tempfile.gettempdir() + "/headway-none"]
    if group.rank() == 0:
        memory = "/dev/shm"
        with suppress(OSError):
            folder = memory if os.access(memory, os.W_OK) else None
            file, name[0] = tempfile.mkstemp(prefix="headway-", dir=folder)
            os.truncate(file, Board.size(group.size()))
            os.close(file)
    dist.broadcast_object_list(name, group=group, device=torch.device("cpu"), group_src=0)
    return name[0]
