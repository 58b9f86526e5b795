"""Sharding, unsharding and shifting of a layout's tensors, under autograd."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import ArgumentError
from ...types import acc_dtype, as_int
from ..shard_table import NO_MESH, ShardTable, check_size, table_digest
from .abort import check_consistency
from .collective import Collective
from .comm_plan import CommPlan, SequenceShards
from .consistency import SHARD, SHIFT, UNSHARD, fields_of_move, read_once


def group_of(layout: ShardTable) -> Any:
    """Return the process group of a layout.

    **Raises:** `ArgumentError` where it was made without one.
    """
    if not layout.group_name:
        raise ArgumentError(NO_MESH)
    return resolve_group(layout.group_name)


def resolve_group(name: str) -> Any:
    """Return the process group of that name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[bad-argument-type]


def check_place(group: Any, rank: int, ranks: int) -> tuple[int, int]:
    """Return rank and ranks of a group.

    **Raises:** `ArgumentError` where they are not those of the layout.
    """
    place = group.rank(), group.size()
    if place != (rank, ranks):
        raise ArgumentError(
            f"the layout is of rank {rank} of {ranks}, but this is rank {place[0]} of {place[1]}: "
            "the process group was made anew; make the layout again"
        )
    return place


def digest_of(table: Tensor, ranks: int) -> int:
    """Return `table_digest` of a table, which is read once."""
    return read_once(table, ranks, lambda pieces: table_digest(pieces, ranks))


class ReshardCall(NamedTuple):
    """A call of `shard`, `unshard` or `shift` that all ranks make.

    - `operation`: its name; `number`: of its consistency check.
    """

    operation: str
    number: int
    group: Any
    device: torch.device

    @staticmethod
    def check(
        operation: str, layout: ShardTable, x: Tensor, dim: int, size: int, *options: Any
    ) -> "ReshardCall":
        """Wait until all ranks are known to make this call; x has `size` tokens along `dim`.

        - `options`: functions that return the call's other numbers, or raise.

        **Raises:** `ArgumentError`, on every rank, where one of them does not.
        """
        group, device = group_of(layout), layout.positions.device

        def fields() -> list[int]:
            check_place(group, layout.rank, layout.ranks)
            holder = "the whole sequence" if operation == SHARD else "this rank's part"
            check_size(x, dim, size, holder)
            trains = torch.is_grad_enabled() and x.requires_grad and operation != SHARD
            digest = digest_of(layout.table, layout.ranks)
            numbers = tuple([float(option()) for option in options])
            return fields_of_move(digest, x, dim % x.dim(), numbers, trains)

        number = check_consistency(operation, fields, group, device)
        return ReshardCall(operation, number, group, device)

    def check_backward(self) -> None:
        """Wait until all ranks are known to be in the backward of this call."""
        check_consistency(self.operation, tuple, self.group, self.device, self.number)


def shard(layout: ShardTable, x: Tensor, dim: int) -> None:
    """Wait until all ranks are known to cut such a tensor by this layout."""
    ReshardCall.check(SHARD, layout, x, dim, layout.length)


def unshard(layout: ShardTable, x: Tensor, dim: int) -> Tensor:
    """See `Layout.unshard`."""
    reshard = ReshardCall.check(UNSHARD, layout, x, dim, layout.local)
    everything = np.array([[0, layout.length]])
    shards = SequenceShards(layout.table, layout.ranks)
    comm = CommPlan(shards, [everything] * layout.ranks, reshard.group)
    return _GatherRows.apply(x.movedim(dim, 0), comm, reshard).movedim(0, dim)


def shift(layout: ShardTable, x: Tensor, by: Any, dim: int, fill: float) -> Tensor:
    """See `Layout.shift`."""
    options = (lambda: _integer(by)), (lambda: float(fill))
    reshard = ReshardCall.check(SHIFT, layout, x, dim, layout.local, *options)
    by = _integer(by)
    shards = SequenceShards(layout.table, layout.ranks)
    shifted = [
        np.clip(shards.ranges_of(rank) + by, 0, layout.length) for rank in range(layout.ranks)
    ]
    requirements = [ranges[ranges[:, 1] > ranges[:, 0]] for ranges in shifted]
    comm = CommPlan(shards, requirements, reshard.group)
    rows = _GatherRows.apply(x.movedim(dim, 0), comm, reshard)
    source = layout.positions.to(x.device) + by
    in_sequence = (source >= 0) & (source < layout.length)
    out = rows.new_full((layout.local, *rows.shape[1:]), fill)
    return out.index_put((in_sequence.nonzero()[:, 0],), rows).movedim(0, dim)


def _integer(by: Any) -> int:
    number = as_int(by)
    if number is None:
        raise ArgumentError(f"by={by!r} must be an integer")
    return number


class _GatherRows(torch.autograd.Function):
    """An all-gather of rows `(local, ...)`, whose gradients are reduced to their holders."""

    @staticmethod
    def forward(ctx, x, comm, reshard):
        ctx.comm, ctx.reshard, ctx.local = comm, reshard, x.shape[0]
        (rows,) = Collective().gather(comm, (_as_part(x),)).wait()
        return rows.view(comm.tokens_read[comm.rank], *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyrefly: ignore[bad-override]
        ctx.reshard.check_backward()
        shape = ctx.local, *grad.shape[1:]
        total = torch.zeros(shape, dtype=acc_dtype(grad.dtype), device=grad.device)
        Collective().reduce_scatter(ctx.comm, (_as_part(grad),)).add_to((_as_part(total),))
        return total.to(grad.dtype), None, None


def _as_part(x: Tensor) -> Tensor:
    """Return (tokens, ...) as (1, 1, tokens, width)."""
    width = x[0].numel() if len(x) else int(np.prod(x.shape[1:]))
    return x.reshape(1, 1, x.shape[0], width)
