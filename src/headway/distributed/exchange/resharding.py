"""Sharding, unsharding and shifting of a layout's tensors, under autograd."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import ArgumentError
from ...types import acc_dtype, as_int
from ..groups import check_place, resolve_group
from ..shard_table import NO_MESH, ShardTable, check_size, table_digest
from .collective import Collective
from .comm_plan import CommPlan, SequenceShards
from .consistency import ConsistencyCheck
from .fields import SHARD, SHIFT, UNSHARD, fields_of_move, read_once


def group_of(layout: ShardTable) -> Any:
    """Return the process group of a layout.

    **Raises:** `ArgumentError` where it was made without one.
    """
    if not layout.group_name:
        raise ArgumentError(NO_MESH)
    return resolve_group(layout.group_name)


def digest_of(table: Tensor, ranks: int) -> int:
    """Return `table_digest` of a table, which is read once."""
    return read_once(table, ranks, lambda pieces: table_digest(pieces, ranks))


def shard(layout: ShardTable, x: Tensor, dim: int) -> None:
    """Wait until all ranks are known to cut such a tensor by this layout."""
    with _check(SHARD, layout) as check:
        _agree(check, layout, x, dim, layout.length)


def unshard(layout: ShardTable, x: Tensor, dim: int) -> Tensor:
    """See `Layout.unshard`."""
    with _check(UNSHARD, layout) as check:
        _agree(check, layout, x, dim, layout.local)
        everything = np.array([[0, layout.length]])
        return _gather(check, layout, x, dim, [everything] * layout.ranks).movedim(0, dim)


def shift(layout: ShardTable, x: Tensor, by: Any, dim: int, fill: float) -> Tensor:
    """See `Layout.shift`."""
    with _check(SHIFT, layout) as check:
        by = _integer(by)
        _agree(check, layout, x, dim, layout.local, (float(by), float(fill)))
        shards = SequenceShards(layout.table, layout.ranks)
        shifted = [
            np.clip(shards.ranges_of(rank) + by, 0, layout.length) for rank in range(layout.ranks)
        ]
        requirements = [ranges[ranges[:, 1] > ranges[:, 0]] for ranges in shifted]
        rows = _gather(check, layout, x, dim, requirements)
        source = layout.positions.to(x.device) + by
        in_sequence = (source >= 0) & (source < layout.length)
        out = rows.new_full((layout.local, *rows.shape[1:]), fill)
        return out.index_put((in_sequence.nonzero()[:, 0],), rows).movedim(0, dim)


def _check(operation: str, layout: ShardTable) -> ConsistencyCheck:
    return ConsistencyCheck(operation, group_of(layout), layout.positions.device)


def _agree(
    check: ConsistencyCheck, layout: ShardTable, x: Tensor, dim: int, size: int,
    numbers: tuple[float, ...] = (),
) -> None:  # fmt: skip
    """Wait until all ranks are known to make this call; x has `size` tokens along `dim`."""
    check_place(group_of(layout), layout.rank, layout.ranks)
    is_shard = check.operation == SHARD
    check_size(x, dim, size, "the whole sequence" if is_shard else "this rank's part")
    trains = torch.is_grad_enabled() and x.requires_grad and not is_shard
    digest = digest_of(layout.table, layout.ranks)
    check.begin(fields_of_move(digest, x, dim % x.dim(), numbers, trains))
    check.wait()


def _gather(
    check: ConsistencyCheck, layout: ShardTable, x: Tensor, dim: int, requirements: list[np.ndarray]
) -> Tensor:
    """Return the rows that this rank requires, along the first dimension."""
    group = group_of(layout)
    comm = CommPlan(SequenceShards(layout.table, layout.ranks), requirements, group)
    call = check.operation, check.number, layout.positions.device
    return _GatherRows.apply(x.movedim(dim, 0), comm, *call)


def _integer(by: Any) -> int:
    number = as_int(by)
    if number is None:
        raise ArgumentError(f"by={by!r} must be an integer")
    return number


class _GatherRows(torch.autograd.Function):
    """An all-gather of rows `(local, ...)`, whose gradients are reduced to their holders."""

    @staticmethod
    def forward(ctx, x, comm, operation, number, device):
        ctx.comm, ctx.local = comm, x.shape[0]
        ctx.check = operation, comm.group, device, number
        (rows,) = Collective().gather(comm, (_as_part(x),)).wait()
        return rows.view(comm.tokens_read[comm.rank], *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyrefly: ignore[bad-override]
        with ConsistencyCheck(*ctx.check) as check:
            check.begin(())
            check.wait()
            shape = ctx.local, *grad.shape[1:]
            total = torch.zeros(shape, dtype=acc_dtype(grad.dtype), device=grad.device)
            Collective().reduce_scatter(ctx.comm, (_as_part(grad),)).add_to((_as_part(total),))
            return total.to(grad.dtype), None, None, None, None


def _as_part(x: Tensor) -> Tensor:
    """Return (tokens, ...) as (1, 1, tokens, width)."""
    width = x[0].numel() if len(x) else int(np.prod(x.shape[1:]))
    return x.reshape(1, 1, x.shape[0], width)
