"""How many key/value heads a step of complete rows has.

Keys of one step travel beside the kernel of the step before. What nothing hides is the way of the
first step's keys, and in the backward that of the last step's gradients. But a step costs
something by itself, the host must keep up, and a kernel takes no less than its longest work tile:
of documents, whose lengths differ, one of few heads takes as long as one of many.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .cost import away, seconds
from .setting import Setting

# Seconds, in the forward and in the backward, measured on four H100s and H200s at 32k tokens: what
# a step costs a card; and the host for a call, and for each step of it.
_STEP = 150e-6, 250e-6
_HOST = (1.0e-3, 0.6e-3), (0.5e-3, 0.85e-3)
_PROCESSORS = 132  # of a card as fast as `cost` says: not this rank's, since all ranks choose alike
_BACKWARD = 2.5  # forwards
_MOST = 256 << 20  # bytes of the keys and values of a step
_SMALL = 4  # heads of a first or a last step, at most


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
    of_head = s.b * (s.d + s.dv) * s.itemsize  # bytes of a token
    most = max(1, _MOST // max(1, max(setting.needed) * of_head))
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
        return max(_card(sizes, times, _STEP[backward]), call + step * len(sizes))

    return min(_ways(s.hk, most), key=took)


def _card(sizes: Sequence[int], of: _Times, step: float) -> float:
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


def _ways(heads: int, most: int) -> Iterator[list[int]]:
    """Heads in steps of at most `most`, fewest steps first: the first and the last step small, or
    as large as those between."""
    few = range(min(_SMALL, most, heads) + 1)
    for first in few:
        for last in few:
            between = heads - first - last
            if between >= 0:
                count = -(-between // most)
                of = [between * (n + 1) // count - between * n // count for n in range(count)]
                yield [size for size in (first, *of, last) if size]
