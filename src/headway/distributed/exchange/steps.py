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

from .cost import away, seconds
from .setting import MOST, Setting

# Seconds, in the forward and in the backward, measured on two and four H100s and H200s: what a step
# costs a card, in one stream and in lanes; and the host for a call, and for each step of it.
_STEP = 150e-6, 250e-6
_STEP_IN_LANES = 15e-6, 60e-6
_TAIL = 0.2  # of the longest work tile, which a step in lanes takes longer: fewer heads fill a card
_HOST = (0.2e-3, 0.65e-3), (0.4e-3, 1.0e-3)
_PROCESSORS = 132  # of a card as fast as `cost` says: not this rank's, since all ranks choose alike
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


def heads_of_steps(setting: Setting, backward: bool, link: float) -> list[int]:
    """Key/value heads of every step, over links of so many bytes in a second; on the CPU one."""
    s = setting.sizes
    if setting.device.type != "cuda":
        return [1] * s.hk
    of_head = setting.bytes_of_token
    most = max(1, MOST // max(1, max(setting.needed) * of_head))
    way = away(setting.needed, setting.kv.sizes) * of_head / link
    factor = _BACKWARD if backward else 1.0
    times = _Times(
        factor * seconds(s, float(setting.work.max()), "cuda") / s.hk,
        factor * seconds(s, setting.longest[backward], "cuda") / (s.b * s.hq) * _PROCESSORS,
        way,
        4 / s.itemsize * way if backward else 0.0,
    )
    call, step = _HOST[backward]

    def took(sizes: list[int]) -> float:
        if setting.together:
            card = _in_lanes(sizes, times, _STEP_IN_LANES[backward] + _TAIL * times.longest)
        else:
            card = _in_one_stream(sizes, times, _STEP[backward])
        return max(card, call + step * len(sizes))

    return min(_ways(s.hk, most, _LEAST[backward]), key=took)


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
