"""The transport by collectives of `torch.distributed`: one uneven all-to-all per exchange.

All ranks know all sizes. (A chain of sends and receives would wait forever where a rank has left.)
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .comm_plan import (
    CommPlan,
    Parts,
    PendingGather,
    PendingReduce,
    RowRange,
    Transport,
    copy_parts,
    empty_message,
    in_message,
    select_rows,
    unstack,
)
from .in_progress import wait_for


class Collective(Transport):
    """A transport for any backend of `torch.distributed`, within a host and between hosts."""

    def gather(self, comm: CommPlan, parts: Parts) -> PendingGather:
        """See `Transport`."""
        buffers = unstack(comm.empty_buffers(parts), parts)
        sent, received = empty_message(comm.outgoing, parts), empty_message(comm.incoming, parts)
        for rows, target in in_message(sent, comm.outgoing, parts):
            copy_parts(select_rows(parts, rows.holder_start, rows.size), target)
        wait = _exchange(comm, received, comm.incoming, sent, comm.outgoing)
        comm.copy_local(parts, buffers)
        return PendingGather(buffers, wait, in_message(received, comm.incoming, parts))

    def reduce_scatter(self, comm: CommPlan, parts: Parts) -> PendingReduce:
        """See `Transport`."""
        sent, received = empty_message(comm.incoming, parts), empty_message(comm.outgoing, parts)
        for rows, target in in_message(sent, comm.incoming, parts):
            copy_parts(select_rows(parts, rows.reader_start, rows.size), target)
        wait = _exchange(comm, received, comm.outgoing, sent, comm.incoming)
        return PendingReduce(comm, parts, wait, received)


def _exchange(
    comm: CommPlan, received: Tensor, to_receive: list[RowRange], sent: Tensor,
    to_send: list[RowRange],
) -> Callable[[], Any]:  # fmt: skip
    """Begin to send and receive messages; return a function that waits for it."""
    receive_sizes, send_sizes = (
        _elements_per_rank(comm, message, row_ranges)
        for message, row_ranges in ((received, to_receive), (sent, to_send))
    )
    return all_to_all(received, sent, receive_sizes, send_sizes, comm.group)


def _elements_per_rank(comm: CommPlan, message: Tensor, row_ranges: list[RowRange]) -> list[int]:
    """Return how many elements of a message are exchanged with each rank."""
    tokens = [0] * comm.ranks
    for row_range in row_ranges:
        tokens[row_range.peer] += row_range.size
    row_size = message.numel() // max(1, sum(tokens))
    return [count * row_size for count in tokens]


# PyTorch 2.13 gave it a new name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_to_all(
    received: Tensor, sent: Tensor, receive_sizes: list, send_sizes: list, group: Any
) -> Callable[[], None]:
    """Begin an all-to-all of which every rank knows the sizes; return a function that waits for it,
    and keeps `sent` alive until then."""
    work = dist.all_to_all_single(
        received, sent, receive_sizes, send_sizes, group=group, async_op=True
    )
    return lambda sent=sent: wait_for(work, sent.is_cpu)
