"""The communication plan of an exchange: which rows each rank sends to and receives from others.

A rank reads the keys in some ranges of the sequence. Every rank derives the same plan from the same
layout and mask, so no metadata is exchanged: all ranks know who reads which rows of whose tensors.
A reader stores the rows in the order of the sequence. On the way back, contributions to a row are
added in one order, the holder's own first and then rank after rank, so that sums are deterministic.

Tensors are (b, h, tokens, width), as kernels read them; `collective.py` and `pull.py` are the
transports that move them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...backends.base import Call

Parts = tuple[Tensor, ...]  # tensors with one row per token, say K and V


class SequenceShards:
    """The ranges of a sequence that ranks hold, sorted by position.

    - `rank`, `start`, `stop`: arrays with one entry per range.
    - `local_start`: where the range begins in its rank's tensor.
    - `sizes`: tokens of every rank; `ranks`: how many ranks there are; `length`: all tokens.
    """

    def __init__(self, table: Tensor, ranks: int) -> None:
        pieces = table.numpy()
        size = pieces[:, 2] - pieces[:, 1]
        tokens_before = size.cumsum() - size  # pieces are sorted by rank
        first_of_rank = np.searchsorted(pieces[:, 0], pieces[:, 0])
        order = pieces[:, 1].argsort(kind="stable")
        self.ranks = ranks
        self.sizes = np.bincount(pieces[:, 0], size, ranks).astype(np.int64)
        self.rank, self.start, self.stop = pieces[order].T.copy()
        self.local_start = (tokens_before - tokens_before[first_of_rank])[order]
        self.length = int(self.sizes.sum())

    def ranges_of(self, rank: int) -> np.ndarray:
        """Return the (start, stop) of a rank's ranges, ascending, `(ranges, 2)`."""
        held = self.rank == rank
        return np.stack([self.start[held], self.stop[held]], 1)

    def locate(self, ranges: np.ndarray) -> tuple[np.ndarray, ...]:
        """Cut ascending ranges (start, stop) where the rank changes, and return for every cut its
        rank, where it begins in the rank's tensor, and its size."""
        if not len(self.start):
            return (np.zeros(0, np.int64),) * 3
        first = np.searchsorted(self.start, ranges[:, 0], side="right") - 1
        last = np.searchsorted(self.start, ranges[:, 1], side="left")
        count = np.maximum(last - first, 0)
        which = np.repeat(np.arange(len(ranges)), count)
        piece = np.arange(len(which)) - np.repeat(count.cumsum() - count, count) + first[which]
        start = np.maximum(ranges[which, 0], self.start[piece])
        stop = np.minimum(ranges[which, 1], self.stop[piece])
        local_start = self.local_start[piece] + start - self.start[piece]
        return self.rank[piece], local_start, stop - start


def sequence_shards(
    q_table: Tensor, kv_table: Tensor | None, call: Call, rank: int, ranks: int
) -> tuple[SequenceShards, SequenceShards]:
    """Return the shards of queries and of keys: one object where they have one table.

    - `kv_table`: None where every rank has all keys: then all of them count as this rank's.
    """
    if kv_table is None:
        kv_table = torch.tensor([[rank, 0, call.k.shape[2]]], dtype=torch.int64, device="cpu")
    q_shards = SequenceShards(q_table, ranks)
    return q_shards, q_shards if kv_table is q_table else SequenceShards(kv_table, ranks)


class RowRange(NamedTuple):
    """Consecutive rows that one rank holds and another reads.

    - `peer`: the other rank.
    - `holder_start`, `reader_start`: the first row in the holder's and in the reader's tensor.
    - `size`: how many rows.
    """

    peer: int
    holder_start: int
    reader_start: int
    size: int


class CommPlan:
    """The sends and receives of one exchange, as this rank sees them.

    - `requirements`: for every rank, the ranges (start, stop) that it reads, ascending.
    - `incoming`, `outgoing`: rows that this rank reads of others and others of it, by rank.
    - `local`: rows that it reads of itself.
    - `tokens_held`, `tokens_read`: per rank; `received`: how many this rank reads of others.
    - `launch_cache`: what transports and kernels prepare once for this plan.
    """

    def __init__(self, shards: SequenceShards, requirements: list[np.ndarray], group: Any) -> None:
        self.rank, self.ranks, self.group = dist.get_rank(group), shards.ranks, group
        self.tokens_held = [int(size) for size in shards.sizes]
        self.tokens_read: list[int] = []
        self.launch_cache: dict[Any, Any] = {}
        self.outgoing: list[RowRange] = []
        for reader, ranges in enumerate(requirements):
            holder, holder_start, size = shards.locate(ranges)
            reader_start = size.cumsum() - size
            self.tokens_read.append(int(size.sum()))
            if reader != self.rank:
                held = holder == self.rank
                peers = np.full(held.sum(), reader)
                self.outgoing += _row_ranges(
                    peers, holder_start[held], reader_start[held], size[held]
                )
                continue
            all_read = _row_ranges(holder, holder_start, reader_start, size)
            self.local = [rows for rows in all_read if rows.peer == reader]
            self.local_copies = RowCopies([rows[1:] for rows in self.local])
            self.incoming = [rows for rows in all_read if rows.peer != reader]
            self.incoming.sort(key=lambda rows: (rows.peer, rows.reader_start))
        self.received = sum(rows.size for rows in self.incoming)

    def empty_buffers(self, parts: Parts) -> list[Tensor]:
        """Allocate memory for the rows that this rank reads, in `stacked_shapes`."""
        return [
            parts[0].new_empty(shape)
            for shape in stacked_shapes(parts, self.tokens_read[self.rank])
        ]

    def copy_local(self, parts: Parts, buffers: Parts) -> None:
        """Copy the rows that this rank reads of itself."""
        self.local_copies.run(parts, buffers)


def _row_ranges(*columns: np.ndarray) -> list[RowRange]:
    return [RowRange(*row) for row in np.stack(columns, 1).tolist()]


def stacked_shapes(parts: Parts, rows: int) -> list[tuple[int, ...]]:
    """Return the shapes of memory for `rows` rows of every part. Parts of equal shape are stacked
    along the batch, so that one copy serves all of them."""
    if len({(*x.shape[:2], x.shape[3]) for x in parts}) == 1:
        b, h, _, width = parts[0].shape
        return [(len(parts) * b, h, rows, width)]
    return [(*x.shape[:2], rows, x.shape[3]) for x in parts]


def unstack(buffers: list[Tensor], like: Parts) -> Parts:
    """Return the parts in memory of `stacked_shapes`."""
    if len(buffers) == len(like):
        return tuple(buffers)
    return buffers[0].split(like[0].shape[0])


def select_rows(parts: Parts, first: int, size: int) -> Parts:
    """Return `size` rows of every part, from `first` on."""
    return tuple([x[:, :, first : first + size] for x in parts])


def copy_parts(parts: Parts, targets: Parts) -> None:
    """Copy every part into its target."""
    for x, target in zip(parts, targets, strict=True):
        target.copy_(x)


class RowCopies:
    """Copies of some ranges of rows, by one kernel on a GPU.

    - `spans`: of each copy the first row, the first row of its target, and the number of rows.
    """

    def __init__(self, spans: list[tuple[int, int, int]]) -> None:
        self.spans = spans
        self.launch_cache: dict[Any, Any] = {}

    def run(self, parts: Parts, targets: Parts) -> None:
        """Copy rows of `parts` into rows of `targets`, which have the same dtype."""
        if parts[0].is_cuda:
            from ...backends.gpu.rank_copies import copy_rows

            if copy_rows(self.spans, self.launch_cache, parts, targets):
                return
        for first, target_first, size in self.spans:
            copy_parts(select_rows(parts, first, size), select_rows(targets, target_first, size))


class PendingGather:
    """An all-gather of rows in flight, say of K and V.

    - `buffers`: where this rank will read the rows.
    - `wait_for`: waits until they have arrived.
    - `messages`: received rows that then still have to be copied into the buffers.
    """

    def __init__(
        self, buffers: Parts, wait_for: Callable[[], Any],
        messages: Iterable[tuple[RowRange, Parts]] = (),
    ) -> None:  # fmt: skip
        self.buffers, self.wait_for, self.messages = buffers, wait_for, messages

    def wait(self) -> Parts:
        """Wait, and return the rows in the order of the sequence."""
        self.wait_for()
        for row_range, rows in self.messages:
            copy_parts(rows, select_rows(self.buffers, row_range.reader_start, row_range.size))
        return self.buffers


class PendingReduce:
    """A reduce-scatter of rows in flight, say of dK and dV.

    - `parts`: this rank's contributions to all rows that it has read.
    - `wait_for`: waits until `received`, a `message` with the contributions of others, is there.
    - `memory`: kept alive as long as `parts`, which may lie in it.
    """

    def __init__(
        self, comm: CommPlan, parts: Parts, wait_for: Callable[[], Any], received: Tensor,
        memory: Any = None,
    ) -> None:  # fmt: skip
        self.comm, self.parts, self.wait_for = comm, parts, wait_for
        self.received, self.memory = received, memory

    def write(self, targets: Parts) -> None:
        """Write the sums of all rows that this rank holds into `targets`, of any dtype."""
        if targets[0].is_cuda:
            from ...backends.gpu.rank_sums import write_sums

            self.wait_for()
            write_sums(self.comm, self.parts, self.received, targets)
            return
        pairs = zip(self.parts, targets, strict=True)
        sums = tuple([x.new_zeros(target.shape) for x, target in pairs])
        self.add_to(sums)
        copy_parts(sums, targets)

    def add_to(self, sums: Parts) -> None:
        """Add all contributions to `sums`: this rank's own, then the others', rank after rank."""
        for rows in self.comm.local:
            _add_rows(rows, select_rows(self.parts, rows.reader_start, rows.size), sums)
        self.wait_for()
        for rows, contribution in in_message(self.received, self.comm.outgoing, self.parts):
            _add_rows(rows, contribution, sums)


def _add_rows(row_range: RowRange, contribution: Parts, sums: Parts) -> None:
    rows = select_rows(sums, row_range.holder_start, row_range.size)
    for x, total in zip(contribution, rows, strict=True):
        total += x


def empty_message(row_ranges: list[RowRange], like: Parts) -> Tensor:
    """Allocate a message: the rows of ranges, one range after the other, each with all parts."""
    rows = sum(row_range.size for row_range in row_ranges)
    return like[0].new_empty(rows * sum(map(_row_size, like)))


def in_message(
    flat: Tensor, row_ranges: list[RowRange], like: Parts
) -> Iterator[tuple[RowRange, Parts]]:
    """Yield the ranges of a message and views of their rows."""
    for row_range, offsets in message_offsets(row_ranges, like):
        shapes = [(*x.shape[:2], row_range.size, x.shape[3]) for x in like]
        views = [view_at(flat, *place) for place in zip(offsets, shapes, strict=True)]
        yield row_range, tuple(views)


def message_offsets(
    row_ranges: list[RowRange], like: Parts
) -> Iterator[tuple[RowRange, list[int]]]:
    """Yield the ranges of a message and where each of their parts begins."""
    offset = 0
    for row_range in row_ranges:
        offsets = []
        for x in like:
            offsets.append(offset)
            offset += row_range.size * _row_size(x)
        yield row_range, offsets


def view_at(flat: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    """Return a view of this shape that begins at an offset."""
    return flat[offset : offset + math.prod(shape)].view(shape)


def _row_size(x: Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[3]


class ReduceSender:
    """A reduce-scatter that has not begun.

    - `send_buffers`: memory that a kernel may write its gradients into, from which they are sent
      without a copy; None where gradients may lie anywhere.
    - `send`: begins the reduce-scatter.
    """

    def __init__(self, send_buffers: Parts | None, send: Callable[[Parts], PendingReduce]) -> None:
        self.send_buffers, self.send = send_buffers, send


class Transport:
    """A way to move rows between ranks.

    - `overlaps_kernels`: it takes no multiprocessors and waits for no kernel.
    """

    overlaps_kernels = False

    def ahead_of(self, check: Any) -> "Transport":
        """Return the transport of a call whose consistency check is still in flight. This one waits
        for the check.

        - `check`: a `consistency.ConsistencyCheck`.
        """
        check.wait()
        return self

    def gather(self, comm: CommPlan, parts: Parts) -> PendingGather:
        """Begin an all-gather of `parts`, the rows that this rank holds."""
        raise NotImplementedError

    def reduce_scatter(self, comm: CommPlan, parts: Parts) -> PendingReduce:
        """Begin to send `parts`, contributions to the rows that were read, to their holders."""
        raise NotImplementedError

    def reduce_sender(self, comm: CommPlan, like: Parts) -> ReduceSender:
        """Return a sender of contributions like these (of any number of rows). No other exchange
        may begin before it sends."""
        return ReduceSender(None, lambda parts: self.reduce_scatter(comm, parts))
