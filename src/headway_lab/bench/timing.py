"""Time and memory of calls.

Contestants are timed in turns: what disturbs one disturbs all, and medians forget what is left.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

SHORTEST = 2e-3  # seconds: shorter calls are timed many at once
PATIENCE = 8.0  # seconds of measured time after which a contestant sits out further rounds
HEAD_START = 10_000_000  # cycles that a GPU waits before a sample, some 6 ms

Captured = TypeVar("Captured")
Tick = Callable[[], object]  # called after every round of timings


class Timing(NamedTuple):
    """Seconds per call: median and quartiles over the runs."""

    median: float
    low: float
    high: float
    runs: int

    @staticmethod
    def of(samples: list[float]) -> "Timing":
        if len(samples) == 1:
            return Timing(samples[0], samples[0], samples[0], 1)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Timing(median, low, high, len(samples))

    def takes(self, times: float, of: "Timing") -> bool | None:
        """Return whether this takes at least `times` as long as another; None where their
        quartiles leave it open."""
        if self.low < times * of.high and self.high >= times * of.low and self.runs > 1:
            return None
        return self.median >= times * of.median


Mark = float | torch.cuda.Event


def mark(device: str) -> Mark:
    """Return the present: an event on a GPU's stream, or seconds on the CPU; with one thread of
    processor time, which other programs disturb less."""
    if torch.device(device).type != "cuda":
        return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks. Waits for the GPU to reach them."""
    if isinstance(start, float) or isinstance(end, float):
        return end - start  # type: ignore[operator]
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def wait(device: str) -> None:
    """Keep a GPU busy, so that what is called next is queued behind."""
    if torch.device(device).type == "cuda":
        torch.cuda._sleep(HEAD_START)


def seconds(call: Callable[[], object], device: str, number: int = 1) -> float:
    """Return the seconds per call, over `number` calls."""
    start = mark(device)
    for _ in range(number):
        call()
    return between(start, mark(device)) / number


def repeat(call: Callable[[], object], device: str, runs: int, number: int = 1) -> Timing:
    """Time `runs` samples of a call, which has been warmed up."""
    return Timing.of([seconds(call, device, number) for _ in range(runs)])


def captured(call: Callable[[], Captured]) -> tuple[torch.cuda.CUDAGraph, Captured]:
    """Capture a call in a CUDA graph, after three calls on a side stream; return both results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def compare(
    contestants: Mapping[str, Callable[[], object]], repeats: int, device: str = "cpu",
    tick: Tick = lambda: None, patience: float = PATIENCE,
) -> dict[str, Timing]:  # fmt: skip
    """Time every contestant `repeats` times, in turns, in an order that is reversed every round.

    The first call of each is not counted: it says how many calls make a sample, so compile before.
    One that has used up `patience` is timed no more. `tick` is called after every round.

    On a GPU the calls of a sample are issued while it waits, as they are in training, where Python
    is ahead of it: what counts is the GPU's time. (`overhead.host` measures Python's.)
    """
    calls_per_sample = {}
    for name, call in contestants.items():
        seconds_once = seconds(call, device)
        seconds_warm = seconds_once if seconds_once > 100 * SHORTEST else seconds(call, device)
        calls_per_sample[name] = max(1, round(SHORTEST / max(seconds_warm, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for _ in range(repeats):
        for name in order:
            if sum(samples[name]) < patience:
                wait(device)
                samples[name].append(seconds(contestants[name], device, calls_per_sample[name]))
        order.reverse()
        tick()
    return {name: Timing.of(contestant_samples) for name, contestant_samples in samples.items()}


class Clocks:
    """The clock and the power of a GPU, sampled after every round; nothing without NVML."""

    def __init__(self, device: str, tick: Tick = lambda: None) -> None:
        self.device, self.tick = device, tick
        self.samples: list[tuple[float, float]] = []

    def sample(self) -> None:
        """Read MHz of the multiprocessors and W, both of the last moments."""
        if torch.device(self.device).type == "cuda":
            with suppress(Exception):  # NVML is not there, or does not say
                clock, power = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3
                self.samples.append((clock, power))
        self.tick()

    def __str__(self) -> str:
        if not self.samples:
            return ""
        clock, power = map(statistics.median, zip(*self.samples, strict=True))
        return f"{clock:.0f} MHz, {power:.0f} W"


def peak(device: str) -> int:
    """Return the peak memory of this process in bytes: resident, or allocated on its GPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not `ru_maxrss`: on Linux that begins with the parent's peak in a process it has started.
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


@cache
def roof(dtype: str, device: str) -> float:
    """Return the FLOP/s of a square matrix product in this dtype."""
    n = 8192 if torch.device(device).type == "cuda" else 1024
    a = torch.randn(n, n).to(device, getattr(torch, dtype))
    timing = compare({"mm": lambda: a @ a}, 5, device)["mm"]
    return 2 * n**3 / timing.low
