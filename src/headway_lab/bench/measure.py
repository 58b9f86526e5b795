"""Headway and its peers on one case: checked against float64, timed in turns, judged."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch._functorch import config as functorch

from headway.mods import causal

from .case import BACKWARD, FORWARD, Case, Inputs, Size, Unavailable, inputs, size
from .check import Truth
from .machine import roof
from .peers import PEERS, Peer
from .results import NOT_RUN, WRONG, Result
from .timing import Tick, Timing, compare


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
