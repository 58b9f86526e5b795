"""Running the table: select, check, time, judge."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._functorch import config as functorch

from ..errors import ArgumentError
from ..mods import causal
from . import block_masks, child, gpu
from .cases import BACKWARD, FORWARD, Case, Inputs, Size, Unavailable, inputs, select, size
from .check import Truth
from .machine import Machine, has_amx, here, load, roof
from .models import training
from .overhead import overhead
from .peers import PEERS, Peer
from .results import NOT_RUN, WRONG, Book, Result
from .stability import recording
from .timing import Timing, compare

Tick = Callable[[], object]
Show = Callable[[Case, list[Result]], object]


@dataclass(frozen=True)
class Options:
    """What to run, and how."""

    cases: tuple[str, ...] = ()
    """Names, parts of names, or tags; all cases if none is given."""
    device: str = "cpu"
    """cpu, or cuda."""
    threads: int = 2
    """Of PyTorch, on the CPU."""
    repeats: int = 7
    """Runs of every contestant; two, where one takes seconds."""
    output: Path | None = None
    """The CSV to write, or an existing folder, for FOLDER/CARD/bench-DATE.csv; else none."""
    seconds: float | None = None
    """Begin no case after so many seconds; the order is that of `--list`."""
    resume: bool = False
    """Leave out the cases that the CSV of --output has already, and add the others to it."""

    def __post_init__(self) -> None:
        for name in ("threads", "repeats"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"--{name} {getattr(self, name)} must be 1 or more")
        if self.seconds is not None and not self.seconds >= 0:
            raise ArgumentError(f"--seconds {self.seconds:g} must be 0 or more")
        if self.resume and (self.output is None or self.output.is_dir()):
            given = "no --output" if self.output is None else f"--output {self.output}, a folder"
            raise ArgumentError(f"--resume with {given}: name the CSV that is to go on")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ArgumentError(f"--device {self.device!r}: {error}") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ArgumentError(f"--device {self.device}: PyTorch sees no GPU (`headway doctor`)")
        if device.type not in ("cpu", "cuda"):
            raise ArgumentError(f"--device {self.device}: there are cases for cpu and cuda only")


def bench(
    options: Options,
    show: Show = lambda case, results: None,
    begin: Callable[[Case], object] = lambda case: None,
    tick: Tick = lambda: None,
) -> tuple[Path | None, list[Result]]:
    """Run the selected cases; the path of the CSV, None where none was asked for, and every result.

    `begin` is called before a case, `tick` after every round of timings, `show` after a case, when
    its lines are in the CSV. PyTorch's number of threads is put back afterwards.
    """
    cases = select(options.cases, options.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        machine = here(options.device)
        path = place(options.output, machine)
        every: list[Result] = []
        start = time.monotonic()
        with Book(path, options.resume) as book:
            for case in cases:
                if case.name in book.done:
                    continue
                if options.seconds is not None and time.monotonic() - start > options.seconds:
                    break
                begin(case)
                used, results = measure(case, machine, options, tick)
                book.add(used, load(), case, results)
                show(case, results)
                every += results
        return path, every
    finally:
        torch.set_num_threads(threads)


def place(output: Path | None, machine: Machine) -> Path | None:
    """The CSV that `--output` means: in a folder a new one, among those of its card."""
    if output is None or not output.is_dir():
        return output
    stamp = machine.date[:19].replace(":", "")
    return output / machine.card / f"bench-{stamp}.csv"


def measure(
    case: Case, machine: Machine, options: Options, tick: Tick
) -> tuple[Machine, list[Result]]:
    """Measure one case, here or in a process of its own; with the machine as it was there."""
    device, repeats = options.device, options.repeats
    if case.isa and not has_amx():
        return machine, [
            Result(case.name, "", "headway", verdict=NOT_RUN, note="this CPU has no AMX to hide")
        ]
    if case.isa or case.measure in child.MEMORY:
        return child.ask(case, device, repeats, case.isa)
    return machine, MEASURES[case.measure](case, device, repeats, tick)


@dataclass(frozen=True)
class Contestant:
    """A call to time, the tensors that it computes on, and whether it has a backward."""

    forward: Callable[[], Tensor]
    given: Inputs
    backward: bool
    peer: Peer | None = None  # None for Headway

    @property
    def package(self) -> str:
        """What it is a version of, where it has one of its own."""
        return (self.peer.installed or "") if self.peer else ""

    def grads(self) -> Callable[[], object]:
        """The backward to time."""
        return partial(
            torch.autograd.grad, self.forward(), self.given.leaves, self.given.dout,
            retain_graph=True, allow_unused=True,
        )  # fmt: skip


# A compiled peer's backward is timed many times on one forward, whose buffers must last.
@functorch.patch(donated_buffer=False)
def measure_time(case: Case, device: str, repeats: int, tick: Tick = lambda: None) -> list[Result]:
    """Headway and every peer: checked against float64, then timed in turns, in both directions."""
    x = inputs(case, device)
    contestants, notes = _contestants(case, x)
    truth = Truth(case, x)
    checked: dict[str, Result] = {}
    for name, one in list(contestants.items()):
        checked[name] = Result(case.name, "", name, note=one.package)
        if one.peer is not None and not one.peer.same:
            continue
        try:
            errors = truth.errors(one.forward, one.backward, one.given)
        except Exception as error:
            if one.peer is None:
                raise
            why = str(Unavailable.because(error))
            notes.append(replace(checked[name], verdict=NOT_RUN, note=why))
            del contestants[name]
            continue
        worst = max(errors, key=lambda e: e.error / e.limit if e.passed else float("inf"))
        checked[name] = replace(checked[name], error=worst.error, limit=worst.limit)
        if not worst.passed:
            note = f"{worst.what} is off by {worst.error:.1e}, {worst.limit:.1e} are allowed"
            notes.append(replace(checked[name], verdict=WRONG, note=note))
            del contestants[name]
    del truth
    if "headway" not in contestants:
        return notes
    measured = size(case, x.mask)
    results = []
    for direction in (FORWARD, BACKWARD):
        calls = _calls(contestants, direction)
        with torch.set_grad_enabled(direction == BACKWARD):
            times = compare(calls, repeats, device, tick)
        results += [
            _judge(case, direction, checked[name], times, measured, device) for name in times
        ]
    return results + notes


def _contestants(case: Case, x: Inputs) -> tuple[dict[str, Contestant], list[Result]]:
    """Who is timed, Headway first, and a line for every peer that cannot take part; those that are
    not installed are passed over."""
    found = {"headway": Contestant(x.headway, x, backward=True)}
    notes = []
    for name in case.peers:
        peer = PEERS[name]
        if peer.installed is None:
            continue
        given = x.by_rows() if peer.by_rows else x
        backward = x.q.device.type in peer.backward
        try:
            found[name] = Contestant(peer.prepare(case, given), given, backward, peer)
        except Unavailable as why:
            notes.append(Result(case.name, "", name, verdict=NOT_RUN, note=str(why)))
    return found, notes


def _calls(contestants: dict[str, Contestant], direction: str) -> dict[str, Callable[[], object]]:
    if direction == FORWARD:
        return {name: one.forward for name, one in contestants.items()}
    return {name: one.grads() for name, one in contestants.items() if one.backward}


def _judge(
    case: Case, direction: str, checked: Result, times: dict[str, Timing], measured: Size,
    device: str,
) -> Result:  # fmt: skip
    """One line: the numbers, the ratio to Headway, and the target if there is one."""
    name = checked.contestant
    peer, timing, ours = PEERS.get(name), times[name], times["headway"]
    result = replace(checked, direction=direction).timed(timing)
    if peer is None or peer.same:
        flops = measured.flops(direction, *case.widths) / timing.median
        # A product in half precision may be slower than one in float32, which is open to all.
        top = max(roof(case.dtype, device), roof("float32", device))
        result = replace(
            result, pairs=measured.pairs, tiles=measured.tiles, gflops=round(flops / 1e9, 2),
            roof=round(top / 1e9, 2),
        )  # fmt: skip
    if peer is None:
        return result
    ratio, target = timing.median / ours.median, case.target(direction, name)
    if peer.per_tile:
        whole = size(case, causal())
        theirs, each = timing.median / whole.tiles, ours.median / measured.tiles
        ratio = theirs / each
        note = f"{theirs * 1e6:.1f} µs per live tile, here {each * 1e6:.1f} µs"
        result = replace(result, pairs=whole.pairs, tiles=whole.tiles, note=note)
    result = replace(result, ratio=round(ratio, 4))
    for other in case.targets:
        if (other.of, other.direction) == (name, direction) and other.peer in times:
            faster = times[other.peer].median / timing.median
            result = replace(result, note=f"{faster:.2f}x {other.peer}")
            return result.asked(f">= {other.times:g}x {other.peer}", faster >= other.times)
    return result if target is None else result.asked(f">= {target:g}x", ratio >= target)


MEASURES: dict[str, Callable[[Case, str, int, Tick], list[Result]]] = {
    "time": measure_time,
    "recording": recording,
    "overhead": partial(overhead, compiled=False),
    "overhead, compiled": partial(overhead, compiled=True),
    "host": gpu.host,
    "graph": gpu.graph,
    "first call": gpu.first_call,
    "long": gpu.long,
    "train": gpu.train,
    "block mask": block_masks.measure,
    "training": training,
}
