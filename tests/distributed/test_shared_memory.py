"""Ranks of one host that see whether they are alike."""

import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import headway as hw
from headway.distributed import Layout
from headway.distributed.exchange import consistency, shared_memory
from headway.distributed.exchange.shared_memory import (
    _SLOTS,
    SharedMemoryCompare,
    shared_memory_compare,
)
from processes import run_ranks

from .test_consistency import every_field

SECONDS = 20.0
ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # a group of one rank


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "slots"
    file.write_bytes(bytes(SharedMemoryCompare.size(3)))
    return str(file)


def turns(world: int, rank: int) -> None:
    """Alike exactly where all numbers are, however late a rank is."""
    draw, late = random.Random(0), random.Random(rank)
    at = shared_memory_compare(dist.group.WORLD, SECONDS)
    assert at is not None
    for _ in range(2000):
        numbers = [draw.choice([-7, 7, 1 << 70])] * world
        if draw.random() < 0.3:
            numbers[draw.randrange(world)] = 3
        at.write(numbers[rank])
        if late.random() < 0.01:
            time.sleep(2e-3)
        assert at.all_equal() == (len(set(numbers)) == 1)
    assert not list(Path(tempfile.gettempdir()).glob("headway-*"))
    assert not list(Path("/dev/shm").glob("headway-*"))


def left(world: int, rank: int) -> None:
    """A rank that ends is missed at once, not when time is up."""
    at = shared_memory_compare(dist.group.WORLD, 60.0)
    assert at is not None
    if rank == 1:
        os._exit(0)
    at.write(1)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 has left"):
        at.all_equal()
    assert time.monotonic() - began < 10


def not_shared(world: int, rank: int) -> None:
    """Ranks that share no memory compare by messages, and say the same."""
    real = SharedMemoryCompare.__init__

    def apart(self, path, *given):  # a file of that name, of another host
        if rank == 1:
            path += "-apart"
            Path(path).write_bytes(bytes(SharedMemoryCompare.size(world)))
        real(self, path, *given)
        if rank == 1:
            Path(path).unlink()

    def none(self, path, *given):
        if rank == 1:
            raise OSError("no locks here")
        real(self, path, *given)

    for fault in (apart, none):
        consistency._channels.clear()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SharedMemoryCompare, "__init__", fault)
            layout = Layout.zigzag(64, dist.group.WORLD)
            q = torch.randn(1, 2, layout.local, 8)
            hw.attention(q, q, q, layout=layout)
            (how,) = consistency._channels.values()
            assert how.shared_memory is None
    every_field(world, rank)
    consistency._channels.clear()


def test_ranks(tmp_path):
    run_ranks(3, (turns,), tmp_path)


def test_by_messages(tmp_path):
    run_ranks(2, (not_shared,), tmp_path)


def test_left(tmp_path):
    run_ranks(2, (left,), tmp_path)


def named_files(process: int | None) -> list[Path]:
    return list(Path(shared_memory._MEMORY).glob(f"headway-{process}-*"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])  # Ctrl-C; a rank that left
def test_an_interruption_leaves_no_file(error, monkeypatch):
    def interrupted(*args, **named):
        if os.access(shared_memory._MEMORY, os.W_OK):
            assert len(named_files(os.getpid())) == 1
        raise error

    monkeypatch.setattr(dist, "broadcast_object_list", interrupted)
    with pytest.raises(error):
        shared_memory_compare(ALONE, SECONDS)
    assert not named_files(os.getpid())


def killed() -> None:
    dist.broadcast_object_list = lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL)
    shared_memory_compare(ALONE, SECONDS)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no files in memory")
def test_the_file_of_a_killed_process_is_removed(monkeypatch):
    process = multiprocessing.get_context("forkserver").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(named_files(process.pid)) == 1
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *args, **named: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **named: None)
    assert shared_memory_compare(ALONE, SECONDS) is not None
    assert not named_files(process.pid)


def test_in_time(path):
    """A rank that is there, here as a thread would be, and makes no call."""
    compares = [SharedMemoryCompare(path, r, 3, 0.3) for r in range(3)]
    compares[0].write(1)
    assert not compares[0].complete()
    with pytest.raises(RuntimeError, match="rank 1 made no call"):
        compares[0].all_equal()


def test_every_turn_begins_anew(path):
    """What a rank has said before counts for no later turn, when the slots come round too."""
    compares = [SharedMemoryCompare(path, r, 3, SECONDS) for r in range(3)]
    for turn in range(3 * _SLOTS):
        for b in compares[1:]:
            b.write(turn)
        assert not compares[1].complete()
        compares[0].write(turn)
        assert all(b.complete() and b.all_equal() for b in compares)


def test_one_turn_ahead(path):
    """A fast rank's next turn does not hide this one from a slow rank."""
    fast, slow, third = (SharedMemoryCompare(path, r, 3, SECONDS) for r in range(3))
    for turn in range(50):
        for b in (fast, slow, third):
            b.write(turn)
        assert fast.all_equal()
        assert third.all_equal()
        fast.write(turn + 1)
        third.write(turn + 1)
        assert slow.all_equal()
        slow.write(turn + 1)
        assert all(b.all_equal() for b in (fast, slow, third))


def test_waits_for_the_last(path):
    compares = [SharedMemoryCompare(path, r, 2, SECONDS) for r in range(2)]
    compares[0].write(5)
    later = threading.Timer(0.3, lambda: compares[1].write(5))
    later.start()
    assert compares[0].all_equal()  # ranks that are threads of one process have not left
    later.join()


def test_ends(path):
    """Nothing is left open, and the lock is gone."""
    made, other = SharedMemoryCompare(path, 0, 3, SECONDS), SharedMemoryCompare(path, 1, 3, SECONDS)
    file = made.file
    del made
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file)
    del other
