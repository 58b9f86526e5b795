"""Random calls in processes of their own: one that hangs or dies is a failure like another."""

import multiprocessing as mp
import queue
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from headway.errors import BackendRefused

from .calls import Fuzz, check, fuzz, without

HANGS = 240.0  # seconds for one case, its kernels' compilation included


class Case(NamedTuple):
    """What came of a seed. `error` is empty for a case that ran; `refused` says that it was refused."""

    seed: int
    ratios: dict[str, float]
    error: str = ""
    refused: bool = False

    @property
    def fails(self) -> bool:
        return not self.refused and (
            bool(self.error) or not all(r <= 1 for r in self.ratios.values())
        )


def case(seed: int, backend: str, device: str, structures: int) -> Case:
    return result(fuzz(seed, backend, structures), backend, device)


def result(f: Fuzz, backend: str, device: str) -> Case:
    try:
        return Case(f.seed, check(f, backend, device))
    except BackendRefused as error:
        return Case(f.seed, {}, str(error), True)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the seed does
        return Case(f.seed, {}, f"{type(error).__name__}: {error}")


def smaller(f: Fuzz, backend: str, device: str) -> Fuzz:
    """A failing call with all left out that it does not need."""
    for less in without(f):
        if result(less, backend, device).fails:
            return smaller(less, backend, device)
    return f


class Asked(NamedTuple):
    """What every process is told."""

    backend: str
    device: str
    structures: int
    first: int
    workers: int


def seeds_of(asked: Asked, worker: int) -> Iterator[int]:
    """Whole structures belong to one process, which then compiles their kernels once."""
    seed = asked.first
    while True:
        key = seed % asked.structures if asked.structures else seed
        if key % asked.workers == worker:
            yield seed
        seed += 1


def work(asked: Asked, worker: int, after: int, count: int, said: Any) -> None:
    """`count` cases that are not refused, of the seeds behind `after`."""
    torch.set_num_threads(1)
    tried, most = 0, 20 + 10 * count
    for seed in seeds_of(asked, worker):
        if seed <= after:
            continue
        if count <= 0 or tried > most:
            break
        tried += 1
        said.put((worker, seed, None))
        made = case(seed, asked.backend, asked.device, asked.structures)
        said.put((worker, seed, made))
        count -= not made.refused
        if "CUDA error" in made.error or "illegal memory" in made.error:
            break  # the process is lost; another goes on
    else:
        return
    said.put((worker, -1, "stopped"))


@dataclass
class Tally:
    ran: int = 0
    refused: int = 0
    failed: list[Case] = field(default_factory=list)
    worst: dict[str, tuple[float, int]] = field(default_factory=dict)  # of what passed, by result

    def add(self, made: Case) -> None:
        self.refused += made.refused
        self.ran += not made.refused
        if made.fails:
            self.failed.append(made)
        for name, share in made.ratios.items():
            name = "grad captured" if name[5:6] == "t" and name.startswith("grad") else name
            if share <= 1 and share > self.worst.get(name, (-1.0, 0))[0]:
                self.worst[name] = share, made.seed


def many(asked: Asked, cases: int, seconds: float = float("inf")) -> Tally:
    """That many cases, or as many as there is time for, in processes of their own; one that hangs or
    dies is a failure like another."""
    context = mp.get_context("spawn")
    said, tally = context.Queue(), Tally()
    quota = {w: cases // asked.workers + (w < cases % asked.workers) for w in range(asked.workers)}
    at = {w: (asked.first - 1, time.monotonic()) for w in quota}  # the seed being run, since when
    processes, begun = {}, time.monotonic()

    def start(w: int, after: int) -> None:
        at[w] = after, time.monotonic()
        processes[w] = context.Process(
            target=work, args=(asked, w, after, quota[w], said), daemon=True
        )
        processes[w].start()

    for w in quota:
        start(w, asked.first - 1)
    while processes:
        if time.monotonic() - begun > seconds:
            for process in processes.values():
                process.kill()
            break
        try:
            w, seed, made = said.get(timeout=1.0)
            if made is None:
                at[w] = seed, time.monotonic()
            elif isinstance(made, Case):
                tally.add(made)
                quota[w] -= not made.refused
                at[w] = seed, time.monotonic()
            else:  # it stopped
                processes.pop(w).join()
                lost = tally.failed and tally.failed[-1].seed == at[w][0] and quota[w] > 0
                if lost:
                    start(w, at[w][0])
        except queue.Empty:
            for w, process in list(processes.items()):
                seed, since = at[w]
                dead = not process.is_alive() and said.empty()
                if not dead and time.monotonic() - since < HANGS:
                    continue
                process.kill()
                process.join()
                del processes[w]
                if seed < asked.first:
                    raise RuntimeError(f"process {w} ended before its first case") from None
                tally.add(
                    Case(seed, {}, f"died, exit code {process.exitcode}" if dead else "hangs")
                )
                quota[w] -= 1
                if quota[w] > 0:
                    start(w, seed)
        _show(tally, cases, time.monotonic() - begun)
    print(file=sys.stderr)
    return tally


_shown = [0.0]


def _show(tally: Tally, cases: int, seconds: float) -> None:
    """A bar on a terminal; elsewhere a line every 20 s."""
    if time.monotonic() - _shown[0] < (0.2 if sys.stderr.isatty() else 20):
        return
    _shown[0] = time.monotonic()
    done = round(30 * tally.ran / max(cases, 1))
    line = (
        f"[{'#' * done}{' ' * (30 - done)}] {tally.ran}/{cases} cases, {len(tally.failed)} failures, "
        f"{seconds:.0f} s"
    )
    print(f"\r{line}" if sys.stderr.isatty() else line, end="" if sys.stderr.isatty() else "\n",
          file=sys.stderr, flush=True)  # fmt: skip
