"""What the threads of a warp tell each other."""

from collections.abc import Callable

import numpy as np

from .values import Lanes, Step


def _shfl(lanes: Lanes) -> Step:
    """A register of another thread of the warp; the control's lowest five bits are the last that
    may be asked, or, for "up", the first."""
    how = lanes.words[2]
    value, amount, control = (lanes.get(x, "u32") for x in lanes.operands[1:4])
    out = lanes.put(lanes.operands[0], "u32")
    lane = np.arange(lanes.count) % 32
    first = np.arange(lanes.count) - lane

    def step() -> None:
        by, last = amount.astype(np.int64), (control & 31).astype(np.int64)
        if (control >> 8 & 31).any():
            raise lanes.unknown()  # parts of a warp
        source = {"bfly": lane ^ by, "idx": by & 31, "down": lane + by, "up": lane - by}[how]
        inside = source >= last if how == "up" else source <= last
        out[:] = lanes.each(value)[first + np.where(inside, source, lane)]

    return lanes.done(step)


_REDUCED = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def _redux(lanes: Lanes) -> Step:
    kind, by = lanes.words[-1], _REDUCED[lanes.words[2]]
    given, out = lanes.get(lanes.operands[1], kind), lanes.put(lanes.operands[0], kind)

    def step() -> None:
        warps = lanes.each(given).reshape(-1, 32)
        out[:] = np.repeat(by.reduce(warps, 1, dtype=out.dtype), 32)

    return lanes.done(step)


def _vote(lanes: Lanes) -> Step:
    if lanes.words[2] not in ("any", "all"):
        raise lanes.unknown()
    given, out = lanes.get(lanes.operands[1], "pred"), lanes.put(lanes.operands[0], "pred")
    by = np.any if lanes.words[2] == "any" else np.all

    def step() -> None:
        out[:] = np.repeat(by(lanes.each(given).reshape(-1, 32), 1), 32)

    return lanes.done(step)


def _elect(lanes: Lanes) -> Step:
    """One thread of each warp: the first."""
    number, out = lanes.put(lanes.operands[0], "u32"), lanes.put(lanes.operands[1], "pred")
    lane = np.arange(lanes.count) % 32

    def step() -> None:
        number[:] = 0
        out[:] = lane == 0

    return lanes.done(step)


MAKERS: dict[str, Callable[[Lanes], Step]] = {
    "shfl": _shfl, "redux": _redux, "vote": _vote, "elect": _elect,
}  # fmt: skip
