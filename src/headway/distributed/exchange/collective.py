"""Rows travel by collectives of `torch.distributed`: one uneven all-to-all, whose sizes all ranks
know. (A chain of sends and receives would wait forever where a rank has left.)"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .routes import Arriving, Parts, Returning, Routes, Segment, Transport


class Collective(Transport):
    """Any backend, any machines."""

    name = "collective"

    def fetch(self, routes: Routes, parts: Parts) -> "_Fetched":
        """See `Transport`."""
        out = routes.empty(parts)
        to_get, to_give = _counts(routes, parts)
        sent = _packed(parts, routes.outgoing, sum(to_give), held=True)
        came = sent.new_empty(sum(to_get))
        work = all_to_all(came, sent, to_get, to_give, routes.group)
        routes.copy_own(parts, out)
        return _Fetched(work, routes, out, came, sent)

    def home(self, routes: Routes, parts: Parts) -> "_Home":
        """See `Transport`."""
        to_give, to_get = _counts(routes, parts)
        sent = _packed(parts, routes.incoming, sum(to_give), held=False)
        came = sent.new_empty(sum(to_get))
        work = all_to_all(came, sent, to_get, to_give, routes.group)
        return _Home(work, routes, parts, came, sent)


class _Fetched(Arriving):
    def __init__(self, work: Any, routes: Routes, out: Parts, *held: Tensor) -> None:
        self.work, self.routes, self.out, self.held = work, routes, out, held

    def wait(self) -> Parts:
        self.work.wait()
        for to, _, came in _unpacked(self.out, self.routes.incoming, self.held[0], held=False):
            to.copy_(came)
        return self.out


class _Home(Returning):
    def __init__(self, work: Any, routes: Routes, parts: Parts, *held: Tensor) -> None:
        self.work, self.routes, self.parts, self.held = work, routes, parts, held

    def add_to(self, total: Parts) -> None:
        self.routes.add_own(self.parts, total)
        self.work.wait()
        for to, _, came in _unpacked(total, self.routes.outgoing, self.held[0], held=True):
            to += came


def _counts(routes: Routes, parts: Parts) -> tuple[list[int], list[int]]:
    """Numbers that this rank gets of every rank when rows are fetched, and that it gives."""
    found = []
    for segments in (routes.incoming, routes.outgoing):
        tokens = [0] * routes.ranks
        for s in segments:
            tokens[s.rank] += s.size
        found.append([n * sum(_of_token(x) for x in parts) for n in tokens])
    return found[0], found[1]


def _of_token(x: Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[3]


def _packed(parts: Parts, segments: list[Segment], size: int, held: bool) -> Tensor:
    """Rows of segments, one after the other: those at `at` where they are held, else at `to`."""
    flat = parts[0].new_empty(size)
    for of_parts, _, place in _unpacked(parts, segments, flat, held):
        place.copy_(of_parts)
    return flat


def _unpacked(parts: Parts, segments: list[Segment], flat: Tensor, held: bool):
    """(rows of a part, the other rank, the same rows in the message) for all segments."""
    begin = 0
    for rank, at, to, size in segments:
        first = at if held else to
        for x in parts:
            count = size * _of_token(x)
            place = flat[begin : begin + count].view(*x.shape[:2], size, x.shape[3])
            yield x[:, :, first : first + size], rank, place
            begin += count


# PyTorch 2.13 gave it a new name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_to_all(out: Tensor, given: Tensor, to_get: list, to_give: list, group: Any) -> Any:
    """Begin an exchange of which every rank knows the sizes; what to wait for."""
    return dist.all_to_all_single(out, given, to_get, to_give, group=group, async_op=True)
