"""What is copied while the program goes on, and the barriers that tell when it is there.

What threads copy lands when it is waited for and not before: the latest it may. What the copy engine
brings lands as late or at once, by chance, so that a place which is given back too early is found as
well. What it takes to global memory it reads when the place is to be used again, and that lands when
it is waited for, or at the end.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from .memory import address
from .values import BASE, Fault, Lanes, Step

Copy = Callable[[], Callable[[], None] | None]  # reads; what it returns writes


class Queue:
    """What the threads of a warp have begun: copies in groups, and products."""

    def __init__(self) -> None:
        self.open: dict[str, list[Copy]] = {"": [], "bulk": []}
        self.groups: dict[str, list[list[Copy]]] = {"": [], "bulk": []}
        self.landing: list[Callable[[], None]] = []
        self.products: list[Step] = []

    def commit(self, kind: str) -> None:
        self.groups[kind].append(self.open[kind])
        self.open[kind] = []

    def read(self, kind: str, left: int) -> None:
        """All groups but the last ones have been read."""
        groups = self.groups[kind]
        while len(groups) > left:
            self.landing += filter(None, [copy() for copy in groups.pop(0)])

    def land(self, kind: str, left: int) -> None:
        self.read(kind, left)
        for write in self.landing:
            write()
        self.landing.clear()

    def end(self) -> None:
        for kind in self.groups:
            self.commit(kind)
            self.land(kind, 0)
        if self.products:
            raise Fault("products that nobody waits for")


def _fence(lanes: Lanes) -> Step:
    if lanes.words[1:3] == ("proxy", "async") and lanes.words[-1] != "global":
        warps = slice(lanes.lanes.start // 32, lanes.lanes.stop // 32)
        return lambda: lanes.cta.shared.fence(warps)
    return lambda: None


def _cp(lanes: Lanes) -> Step:
    words, kind = lanes.words, "bulk" if "bulk" in lanes.words else ""
    if "tensor" in words:
        return _from_shared(lanes) if "bulk_group" in words else _box_to_shared(lanes)
    if words[2] in ("ca", "cg"):
        return _to_shared(lanes)
    if words[-1] == "commit_group":
        return lambda: [queue.commit(kind) for queue in lanes.queues]
    if "wait_group" in words:
        left, wait = int(lanes.operands[0]), Queue.read if words[-1] == "read" else Queue.land
        return lambda: [wait(queue, kind, left) for queue in lanes.queues]
    raise lanes.unknown()


def _to_shared(lanes: Lanes) -> Step:
    """4, 8 or 16 bytes for each thread; beyond what is to be read they are zeros."""
    to, given, size, *read = lanes.operands
    target, source = address(lanes, to, 32), address(lanes, given, 64)
    size = int(size, 0)
    wanted = lanes.get(read[0], "u32") if read else np.array([size], np.uint32)
    word = np.dtype(f"u{min(size, 8)}")
    count = size // word.itemsize

    def begin() -> None:
        which = lanes.threads()
        if not len(which):
            return
        places, reads, ours = target()[which], lanes.each(wanted)[which], lanes.warps[which]
        full, rows = reads == size, np.zeros((len(which), count), word)
        if (reads[~full] != 0).any():
            raise Fault("a part of what a thread copies is not known here")
        if full.any():
            rows[full] = lanes.cta.globally.read(source()[which][full], word, count)
        shared = lanes.cta.shared
        # From now on it may be written: whoever still reads what stood there has lost it.
        offsets = shared.offsets(places, size)
        shared.writes(offsets[:, None] + np.arange(size, dtype=np.uint64), ours)
        lanes.queues[0].open[""].append(
            lambda: partial(shared.write, places, rows, ours, fresh=False)
        )

    return begin


# -- the copy engine -------------------------------------------------------------------------------


class Map(NamedTuple):
    """A tensor and the box of it that is copied at once; the dimension whose elements are
    neighbours comes first. Shared memory has 16 bytes of a row at places that turn with the row,
    of which there are `width` / 16."""

    begin: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    box: tuple[int, ...]
    width: int

    @property
    def size(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.box))

    def inside(self, corner: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Of each element of a box: whether the tensor has it, and its address."""
        found, at = np.array([True]), np.array([self.begin])
        for n, step, first, size in zip(self.shape, self.strides, corner, self.box, strict=True):
            here = first + np.arange(size)
            found = ((here >= 0) & (here < n))[:, None] & found.reshape(1, -1)
            at = (here * step)[:, None] + at.reshape(1, -1)
            found, at = found.ravel(), at.ravel()
        return found, at.astype(np.uint64)

    def places(self, at: int) -> np.ndarray:
        """Where each element of a box lies in shared memory."""
        if at % 128:
            raise Fault(f"a copy to {at}, which is no multiple of 128")
        places = at + np.arange(self.size // self.dtype.itemsize) * self.dtype.itemsize
        return (places ^ (places >> 3 & (self.width - 16))).astype(np.uint64)


class Asked(NamedTuple):
    """A box, where it is in shared memory, and who asks for it."""

    box: Map
    corner: tuple[int, ...]
    place: int
    thread: int


def _asks(lanes: Lanes, tensor: tuple, place: tuple) -> Callable[[], list[Asked]]:
    """What is asked for, by every thread for which the instruction happens."""
    given = [lanes.get(tensor[0], "u64"), *(lanes.get(x, "s32") for x in tensor[2])]
    at = address(lanes, place, 32)

    def asked() -> list[Asked]:
        found = []
        for thread in map(int, lanes.threads()):
            where, *corner = (int(lanes.each(x)[thread]) for x in given)
            if where not in lanes.cta.maps:
                raise Fault(f"no descriptor of a tensor at {where:#x}")
            found.append(Asked(lanes.cta.maps[where], tuple(corner), int(at()[thread]), thread))
        return found

    return asked


def _box_to_shared(lanes: Lanes) -> Step:
    """A box to shared memory; a barrier is told how many bytes came. Outside of the tensor are
    zeros."""
    to, tensor, bar = lanes.operands[:3]
    asks, tells = _asks(lanes, tensor, to), address(lanes, bar, 32)

    def begin() -> None:
        for box, corner, place, thread in asks():
            copy = partial(land, box, corner, box.places(place))
            barrier = barrier_at(lanes, int(tells()[thread]))
            if lanes.cta.random.integers(2):
                copy()
                copy = _landed
            barrier.copies.append((box.size, copy))

    def land(box: Map, corner: tuple[int, ...], places: np.ndarray) -> None:
        inside, at = box.inside(corner)
        values = np.zeros(len(at), box.dtype)
        if inside.any():
            values[inside] = lanes.cta.globally.read(at[inside], box.dtype, 1)[:, 0]
        lanes.cta.shared.write_by_engine(places, values)

    return begin


def _landed() -> None:
    """A copy that is there already."""


def _from_shared(lanes: Lanes) -> Step:
    """A box to global memory, or added to what stands there."""
    words, (tensor, given) = lanes.words, lanes.operands[:2]
    asks, adds = _asks(lanes, tensor, given), "add" in words
    if words[1] == "reduce" and not adds:
        raise lanes.unknown()

    def begin() -> None:
        for box, corner, place, thread in asks():
            copy = partial(read, box, corner, box.places(place))
            lanes.queues[thread // 32].open["bulk"].append(copy)

    def read(box: Map, corner: tuple[int, ...], places: np.ndarray) -> Callable[[], None]:
        return partial(write, box, corner, lanes.cta.shared.read_by_engine(places, box.dtype))

    def write(box: Map, corner: tuple[int, ...], values: np.ndarray) -> None:
        inside, at = box.inside(corner)
        values, at = values[inside, None], at[inside]
        if not len(at):
            return
        if adds:
            values = values + lanes.cta.globally.read(at, box.dtype, 1)
        lanes.cta.globally.write(at, values)

    return begin


# -- barriers in shared memory ---------------------------------------------------------------------


class Barrier:
    """Counts those who arrive and bytes that come; then it begins anew."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.bytes = 0  # that are to come
        self.phase = 0
        self.copies: list[tuple[int, Callable[[], None]]] = []

    def arrive(self, expects: int = 0) -> None:
        if not self.left:
            raise Fault("more arrive at a barrier than it counts")
        self.bytes += expects
        self.left -= 1
        self.turn()

    def arrives_with(self, work: Callable[[], None]) -> None:
        """Somebody arrives when some work is done."""

        def land() -> None:
            work()
            self.left -= 1

        self.copies.append((0, land))

    def turn(self) -> None:
        if not self.left and not self.bytes:
            self.phase ^= 1
            self.left = self.count

    def passed(self, parity: int) -> bool:
        """Whether that phase is over; what is on its way to a barrier comes when one looks."""
        if self.phase == parity:
            for size, land in self.copies:
                land()
                self.bytes -= size
            if self.copies:
                self.copies = []
                self.turn()
        return self.phase != parity


def barrier_at(lanes: Lanes, at: int) -> Barrier:
    if at not in lanes.cta.barriers:
        raise Fault(f"no barrier at {at - BASE} of shared memory")
    return lanes.cta.barriers[at]


def _init(lanes: Lanes) -> Step:
    where, count = lanes.operands
    at = address(lanes, where, 32)

    def step() -> None:
        for place in {*map(int, at()[lanes.threads()])}:
            lanes.cta.barriers[place] = Barrier(int(count))

    return step


def _arrive(lanes: Lanes) -> Step:
    operands = lanes.operands[1:]
    at = address(lanes, operands[0], 32)
    more = lanes.get(operands[1], "u32") if len(operands) > 1 else np.zeros(1, np.uint32)
    expects = "expect_tx" in lanes.words

    def step() -> None:
        for place in map(int, at()[lanes.threads()]):
            barrier_at(lanes, place).arrive(int(more[0]) if expects else 0)

    return step


def waits(lanes: Lanes) -> Callable[[], bool]:
    """Looks whether what is waited for has come, and says so in a predicate."""
    out, where, parity = lanes.operands[:3]
    at, phase = address(lanes, where, 32), lanes.get(parity, "u32")
    place = lanes.put(out, "pred")

    def come() -> bool:
        pairs = np.stack([at(), lanes.each(phase) & 1], 1)
        asked = {*map(tuple, (pairs if (pairs != pairs[0]).any() else pairs[:1]).tolist())}
        place[:] = all(barrier_at(lanes, a).passed(p) for a, p in asked)
        return bool(place[0])

    return come


def _mbarrier(lanes: Lanes) -> Step:
    made = {"init": _init, "arrive": _arrive, "inval": lambda lanes: lambda: None}
    return made[lanes.words[1]](lanes)


MAKERS: dict[str, Callable[[Lanes], Step]] = {
    "cp": _cp, "fence": _fence, "membar": _fence, "mbarrier": _mbarrier,
}  # fmt: skip
