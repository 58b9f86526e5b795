"""How many key/value heads a step of complete rows has.

Keys of one step travel beside the kernel of the step before. What nothing hides is the way of the
first step's keys, and in the backward that of the last step's gradients. But a step costs
something by itself, the host must keep up, and a kernel takes no less than its longest work tile:
of documents, whose lengths differ, one of few heads takes as long as one of many.

Where the keys of all steps fit, kernels are in lanes (`lanes.py`): the next one's work tiles begin
where this one's leave multiprocessors free.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .setting import MOST, Setting, Sizes

# Bytes and flops in a second: what links and cards reach (copy engines between four cards of one
# host, 10 Gb/s for gloo).
LINK = {"cuda": 250e9, "cpu": 1.2e9}
BETWEEN = {"cuda": 45e9, "cpu": 1.2e9}  # nodes, for every card: 400 Gb/s
_SPEED = {"cuda": 600e12, "cpu": 50e9}
EXCHANGE = {"cuda": 30e-6, "cpu": 300e-6}  # seconds until an exchange has begun
# Seconds, in the forward and in the backward, measured on two and four H100s and H200s: what a step
# costs a card, in one stream and in lanes; and the host for a call, and for each step of it.
_STEP = 150e-6, 250e-6
_STEP_IN_LANES = 15e-6, 60e-6
_TAIL = 0.2  # of the longest work tile, which a step in lanes takes longer: fewer heads fill a card
_HOST = (0.2e-3, 0.65e-3), (0.4e-3, 1.0e-3)
_PROCESSORS = 132  # of a card as fast as `_SPEED`: not this rank's, since all ranks choose alike
_BACKWARD = 2.5  # forwards
# Heads of a small first or last step: in a backward of one all CTAs add to the dQ of few heads.
_LEAST, _SMALL = (1, 2), 4


class _Times(NamedTuple):
    """Seconds that a key/value head takes: its kernel, and a kernel's longest work tile; the way of
    its keys and values, and of their gradients (0 in the forward)."""

    kernel: float
    longest: float
    keys: float
    gradients: float


def away(needed: Sequence[int], held: np.ndarray) -> int:
    """Return how many remote tokens the rank that is sent most receives, of those that each rank
    needs and holds."""
    return max(n - min(n, own) for n, own in zip(needed, held.tolist(), strict=True))


def kernels(s: Sizes, pairs: float, device: str, backward: bool) -> float:
    """Return the seconds of a call's kernels for so many pairs of a head."""
    flops = 2.0 * s.b * s.hq * (s.d + s.dv) * pairs * (_BACKWARD if backward else 1.0)
    return flops / _SPEED.get(device, 1e14)


def heads_of_steps(setting: Setting, backward: bool, link: float) -> list[int]:
    """Key/value heads of every step, over links of so many bytes in a second; on the CPU one."""
    s = setting.sizes
    if setting.device.type != "cuda":
        return [1] * s.hk
    most = max(1, MOST // max(1, max(setting.needed) * setting.bytes_of_token))
    ways = _ways(s.hk, most, _LEAST[backward])
    times = _times(setting, backward, link, setting.needed)
    return min(ways, key=lambda sizes: _took(setting, sizes, backward, times))


def seconds(
    setting: Setting, sizes: Sequence[int], backward: bool, link: float, needed: Sequence[int]
) -> float:
    """Return what a call, or its backward, takes in steps of so many key/value heads, with the
    host.

    - `needed`: tokens of keys that every rank is given.
    """
    return _took(setting, sizes, backward, _times(setting, backward, link, needed))


def one_step(backward: bool, device: str) -> float:
    """Return the seconds that a step costs by itself, in one stream."""
    return _STEP[backward] if device == "cuda" else EXCHANGE.get(device, 1e-4)


def host(steps: int, backward: bool, device: str) -> float:
    """Return the seconds of the host for a call of so many steps on a card."""
    call, step = _HOST[backward]
    return call + step * steps if device == "cuda" else 0.0


def _times(setting: Setting, backward: bool, link: float, needed: Sequence[int]) -> _Times:
    s, device = setting.sizes, setting.device.type
    way = away(needed, setting.kv.sizes) * setting.bytes_of_token / link
    longest = 0.0
    if device == "cuda":
        pairs = setting.longest[backward] * _PROCESSORS
        longest = kernels(s, pairs, device, backward) / (s.b * s.hq)
    return _Times(
        kernels(s, float(setting.work.max()), device, backward) / s.hk,
        longest,
        way,
        4 / s.itemsize * way if backward else 0.0,
    )


def _took(setting: Setting, sizes: Sequence[int], backward: bool, times: _Times) -> float:
    device = setting.device.type
    if device == "cuda" and setting.together:
        card = _in_lanes(sizes, times, _STEP_IN_LANES[backward] + _TAIL * times.longest)
    else:
        card = _in_one_stream(sizes, times, one_step(backward, device))
    return max(card, host(len(sizes), backward, device))


def _in_one_stream(sizes: Sequence[int], of: _Times, step: float) -> float:
    """Seconds of a card. Copies are made one after the other, each as soon as may be: the next
    step's keys when a kernel begins, a step's gradients when it has ended."""
    end = 0.0
    copies = here = of.keys * sizes[0]
    for n, heads in enumerate(sizes):
        begin = max(end, here)
        if n + 1 < len(sizes):
            copies = here = max(copies, begin) + of.keys * sizes[n + 1]
        end = begin + max(of.kernel * heads, of.longest) + step
        copies = max(copies, end) + of.gradients * heads
    return copies if of.gradients else end


def _in_lanes(sizes: Sequence[int], of: _Times, step: float) -> float:
    """Seconds of a card where all keys are on their way at once, and a kernel begins when those
    before it have no more work tiles to give."""
    here = begin = end = copies = 0.0
    for heads in sizes:
        here += of.keys * heads
        begin = max(begin, here)
        end = max(end, begin + max(of.kernel * heads, of.longest)) + step
        copies = max(copies, end) + of.gradients * heads
        begin += of.kernel * heads + step
    return copies if of.gradients else end


def _ways(heads: int, most: int, least: int) -> Iterator[list[int]]:
    """Heads in steps of at most `most`, fewest steps first: the first and the last step small, from
    `least` to `_SMALL`, or as large as those between."""
    few = 0, *range(least, min(_SMALL, most, heads) + 1)
    for first in few:
        for last in few:
            between = heads - first - last
            if between >= 0:
                count = -(-between // most)
                of = [between * (n + 1) // count - between * n // count for n in range(count)]
                yield [size for size in (first, *of, last) if size]
