"""Who sends which tokens to whom, and back.

A rank wants the keys of some stretches of the sequence. Every rank works out the same plan from the
same layout and mask, so nothing is asked: it is known who reads which rows of whose tensors, and
where they belong among those that he reads, which are in the order of the sequence. On the way home
contributions are added in one order, the holder's own first and then rank after rank, so that sums
are the same every time.

Tensors are (b, h, tokens, width), as kernels read them; `collective.py` and `pull.py` move them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.base import Call

Parts = tuple[Tensor, ...]  # of one token: its key and its value, say


class Pieces:
    """The pieces of a layout in the order of the sequence, and where each lies in its rank."""

    def __init__(self, table: Tensor, ranks: int) -> None:
        found = table.numpy()
        size = found[:, 2] - found[:, 1]
        total = size.cumsum() - size  # pieces are sorted by rank
        first = np.searchsorted(found[:, 0], found[:, 0])
        order = found[:, 1].argsort(kind="stable")
        self.ranks, self.sizes = ranks, np.bincount(found[:, 0], size, ranks).astype(np.int64)
        self.rank, self.start, self.stop = found[order].T.copy()
        self.at = (total - total[first])[order]  # in its rank's tensor
        self.length = int(self.sizes.sum())

    def of(self, rank: int) -> np.ndarray:
        """(start, stop) of the pieces of a rank, ascending, `(pieces, 2)`."""
        mine = self.rank == rank
        return np.stack([self.start[mine], self.stop[mine]], 1)

    def cut(self, wanted: np.ndarray) -> tuple[np.ndarray, ...]:
        """Stretches (start, stop), ascending, cut where the rank changes: rank, start in the rank's
        tensor, and size of each part."""
        if not len(self.start):
            return (np.zeros(0, np.int64),) * 3
        first = np.searchsorted(self.start, wanted[:, 0], side="right") - 1
        last = np.searchsorted(self.start, wanted[:, 1], side="left")
        count = np.maximum(last - first, 0)
        which = np.repeat(np.arange(len(wanted)), count)
        piece = np.arange(len(which)) - np.repeat(count.cumsum() - count, count) + first[which]
        start = np.maximum(wanted[which, 0], self.start[piece])
        stop = np.minimum(wanted[which, 1], self.stop[piece])
        return self.rank[piece], self.at[piece] + start - self.start[piece], stop - start


def pieces_of(
    q: Tensor, kv: Tensor | None, call: Call, rank: int, ranks: int
) -> tuple[Pieces, Pieces]:
    """Of the tables of queries and keys; None: every rank has all keys, so here all are its own."""
    if kv is None:
        kv = torch.tensor([[rank, 0, call.k.shape[2]]], dtype=torch.int64, device="cpu")
    return Pieces(q, ranks), Pieces(kv, ranks)


class Segment(NamedTuple):
    """Rows `at` and the next, `size` of them, of a holder's tensor: in a reader's they are `to` and
    the next. `rank` is the other one of the two."""

    rank: int
    at: int
    to: int
    size: int


class Routes:
    """One exchange: what rank r reads, `wanted[r]`, stretches (start, stop) in ascending order.

    - `step`: only what rank r reads of rank `r - step` (a ring's); None: of all.
    - `incoming`, `outgoing`: what this rank reads of others, and others of it, rank after rank;
      `own`: what it reads of itself.
    - `held`, `rows`: tokens that every rank holds, and reads; `received`: those that this rank
      reads of others.
    - `known`: what those who move rows have worked out for these routes.
    """

    def __init__(
        self, pieces: Pieces, wanted: list[np.ndarray], group: Any, step: int | None = None
    ) -> None:
        self.me, self.ranks, self.group = dist.get_rank(group), pieces.ranks, group
        self.held = [int(n) for n in pieces.sizes]
        self.rows: list[int] = []
        self.known: dict[Any, Any] = {}
        self.outgoing: list[Segment] = []
        for r, stretches in enumerate(wanted):
            rank, at, size = pieces.cut(stretches)
            if step is not None:
                of = rank == (r - step) % pieces.ranks
                rank, at, size = rank[of], at[of], size[of]
            to = size.cumsum() - size
            self.rows.append(int(size.sum()))
            if r != self.me:
                mine = rank == self.me
                self.outgoing += _segments(np.full(mine.sum(), r), at[mine], to[mine], size[mine])
                continue
            found = _segments(rank, at, to, size)
            self.own = [s for s in found if s.rank == r]
            self.own_copies = Copies([s[1:] for s in self.own])
            self.incoming = sorted([s for s in found if s.rank != r], key=lambda s: (s.rank, s.to))
        self.received = sum(s.size for s in self.incoming)

    def empty(self, parts: Parts) -> list[Tensor]:
        """Memory for what this rank reads, `stacked`."""
        return [parts[0].new_empty(shape) for shape in stacked(parts, self.rows[self.me])]

    def copy_own(self, parts: Parts, out: Parts) -> None:
        """The rows that this rank reads of itself."""
        self.own_copies.make(parts, out)


def _segments(*columns: np.ndarray) -> list[Segment]:
    return [Segment(*row) for row in np.stack(columns, 1).tolist()]


def stacked(parts: Parts, rows: int) -> list[tuple[int, ...]]:
    """The shapes of memory for `rows` rows of every part: where these are alike, one behind the
    other along the batch, which takes one copy for all; else each by itself."""
    if len({(*x.shape[:2], x.shape[3]) for x in parts}) == 1:
        b, h, _, width = parts[0].shape
        return [(len(parts) * b, h, rows, width)]
    return [(*x.shape[:2], rows, x.shape[3]) for x in parts]


def unstacked(memory: list[Tensor], like: Parts) -> Parts:
    """The parts that lie in such memory."""
    if len(memory) == len(like):
        return tuple(memory)
    return memory[0].split(like[0].shape[0])


def rows_of(parts: Parts, first: int, size: int) -> Parts:
    """The rows from `first` on, `size` of them."""
    return tuple([x[:, :, first : first + size] for x in parts])


def copy(parts: Parts, to: Parts) -> None:
    """`to` becomes `parts`."""
    for x, y in zip(parts, to, strict=True):
        y.copy_(x)


class Copies:
    """Copies of some rows, on a GPU by one kernel.

    - `spans`: of each copy the first row, the first row where it is copied to, and their number.
    """

    def __init__(self, spans: list[tuple[int, int, int]]) -> None:
        self.spans = spans
        self.known: dict[Any, Any] = {}

    def make(self, parts: Parts, to: Parts) -> None:
        """Rows of `parts` become rows of `to`, of the same dtype."""
        if parts[0].is_cuda:
            from ...backends.gpu.rank_copies import copy_rows

            if copy_rows(self.spans, self.known, parts, to):
                return
        for first, there, size in self.spans:
            copy(rows_of(parts, first, size), rows_of(to, there, size))


class Arriving:
    """Rows that are on their way into `out`.

    - `done`: waits for them.
    - `came`: those that still lie in a message then.
    """

    def __init__(
        self, out: Parts, done: Callable[[], Any], came: Iterable[tuple[Segment, Parts]] = ()
    ) -> None:
        self.out, self.done, self.came = out, done, came

    def wait(self) -> Parts:
        """The rows, in the order of the sequence."""
        self.done()
        for s, rows in self.came:
            copy(rows, rows_of(self.out, s.to, s.size))
        return self.out


class Returning:
    """Contributions that are on their way home.

    - `parts`: this rank's, to all rows that it has read; `came`: a `message` with those of others,
      when `done` has waited for them.
    - `memory`: whose lifetime is that of `parts`, where these do not keep it.
    """

    def __init__(
        self, routes: Routes, parts: Parts, done: Callable[[], Any], came: Tensor,
        memory: Any = None,
    ) -> None:  # fmt: skip
        self.routes, self.parts, self.done, self.came = routes, parts, done, came
        self.memory = memory

    def write(self, to: Parts) -> None:
        """`to`, of any dtype, becomes the sums for all rows held here."""
        if to[0].is_cuda:
            from ...backends.gpu.rank_sums import write_sums

            self.done()
            write_sums(self.routes, self.parts, self.came, to)
            return
        total = tuple([x.new_zeros(y.shape) for x, y in zip(self.parts, to, strict=True)])
        self.add_to(total)
        copy(total, to)

    def add_to(self, total: Parts) -> None:
        """Add contributions to `total`, of the rows held here: its own, and then what came home,
        rank after rank."""
        own = [(s, rows_of(self.parts, s.to, s.size)) for s in self.routes.own]
        _add(own, total)
        self.done()
        _add(in_message(self.came, self.routes.outgoing, self.parts), total)


def _add(contributions: Iterable[tuple[Segment, Parts]], total: Parts) -> None:
    for s, rows in contributions:
        for x, y in zip(rows, rows_of(total, s.at, s.size), strict=True):
            y += x


def message(segments: list[Segment], like: Parts) -> Tensor:
    """Memory for the rows of segments, one after the other, and of each its parts."""
    return like[0].new_empty(sum(s.size for s in segments) * sum(map(_of_token, like)))


def in_message(
    flat: Tensor, segments: list[Segment], like: Parts
) -> Iterator[tuple[Segment, Parts]]:
    """The segments of a message and where their rows lie in it."""
    for s, begins in beginnings(segments, like):
        shapes = [(*x.shape[:2], s.size, x.shape[3]) for x in like]
        yield s, tuple([view_at(flat, *of) for of in zip(begins, shapes, strict=True)])


def beginnings(segments: list[Segment], like: Parts) -> Iterator[tuple[Segment, list[int]]]:
    """The segments of a message, and where each of their parts begins."""
    begin = 0
    for s in segments:
        begins = []
        for x in like:
            begins.append(begin)
            begin += s.size * _of_token(x)
        yield s, begins


def view_at(flat: Tensor, begin: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape that begins there."""
    return flat[begin : begin + math.prod(shape)].view(shape)


def _of_token(x: Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[3]


class Leaving:
    """Contributions that will go home.

    - `room`: memory for them, from which they leave as they are; None: anywhere.
    - `send`: begins to send them.
    """

    def __init__(self, room: Parts | None, send: Callable[[Parts], Returning]) -> None:
        self.room, self.send = room, send


class Transport:
    """How rows travel.

    - `beside_kernels`: whether they take no multiprocessors, and wait for no kernel.
    """

    beside_kernels = False

    def ahead_of(self, agreement: Any) -> "Transport":
        """For a call on which ranks may not have agreed yet (`agreement.Agreement`); here, when
        they have."""
        agreement.wait()
        return self

    def fetch(self, routes: Routes, parts: Parts) -> Arriving:
        """Begin to fetch what is read of `parts`, of the rows held here."""
        raise NotImplementedError

    def home(self, routes: Routes, parts: Parts) -> Returning:
        """Begin to send contributions to the rows that were read to those who hold them."""
        raise NotImplementedError

    def leaving(self, routes: Routes, like: Parts) -> Leaving:
        """Before contributions like these (of any number of rows) are made that will go home; there
        is no other exchange in between."""
        return Leaving(None, lambda parts: self.home(routes, parts))
