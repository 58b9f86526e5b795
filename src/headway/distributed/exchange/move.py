"""A layout's tensors, from rank to rank: `Layout.unshard` and `Layout.shift` under autograd."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import ArgumentError
from ...types import acc_dtype, as_int
from ..layout import NO_MESH, Layout, check_size, digest
from .agreement import SHARD, SHIFT, UNSHARD, fields_of_move, read_once
from .collective import Collective
from .routes import Pieces, Routes
from .settle import agree


def group_of(layout: Layout) -> Any:
    """The process group of a layout.

    **Raises:** `ArgumentError` where it was made without one.
    """
    if not layout.group_name:
        raise ArgumentError(NO_MESH)
    return resolved(layout.group_name)


def resolved(name: str) -> Any:
    """The process group of that name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[bad-argument-type]


def check_place(group: Any, rank: int, ranks: int) -> tuple[int, int]:
    """Rank and ranks of a group, which are those of a layout.

    **Raises:** `ArgumentError` where they are not.
    """
    here = group.rank(), group.size()
    if here != (rank, ranks):
        raise ArgumentError(
            f"the layout is of rank {rank} of {ranks}, but this is rank {here[0]} of {here[1]}: "
            "the process group was made anew; make the layout again"
        )
    return here


def digest_of(table: Tensor, ranks: int) -> int:
    """A number, 63 bits, that other tables of pieces do not have."""
    return read_once(table, ranks, lambda t: digest(t, ranks))


class Made(NamedTuple):
    """A call on a layout's tensor that all ranks make: what it does, and its number."""

    does: str
    number: int
    group: Any
    device: torch.device

    @staticmethod
    def by_all(does: str, layout: Layout, x: Tensor, dim: int, size: int, *options: Any) -> "Made":
        """Wait until all ranks are known to make this call; x has `size` tokens along `dim`.

        **Raises:** `ArgumentError`, on every rank, where one of them does not.
        """
        group, device = group_of(layout), layout.positions.device

        def fields() -> list[int]:
            check_place(group, layout.rank, layout.ranks)
            check_size(x, dim, size, "the whole sequence" if does == SHARD else "this rank's part")
            trains = torch.is_grad_enabled() and x.requires_grad and does != SHARD
            at = digest_of(layout.table, layout.ranks)
            return fields_of_move(
                at, x, dim % x.dim(), tuple([float(f()) for f in options]), trains
            )

        return Made(does, agree(does, fields, group, device), group, device)

    def backward(self) -> None:
        """Wait until all ranks are known to be in the backward of this call."""
        agree(self.does, tuple, self.group, self.device, self.number)


def shard(layout: Layout, x: Tensor, dim: int) -> None:
    """Wait until all ranks are known to cut such a tensor by this layout."""
    Made.by_all(SHARD, layout, x, dim, layout.length)


def unshard(layout: Layout, x: Tensor, dim: int) -> Tensor:
    """See `Layout.unshard`."""
    made = Made.by_all(UNSHARD, layout, x, dim, layout.local)
    everything = np.array([[0, layout.length]])
    routes = Routes(Pieces(layout.table, layout.ranks), [everything] * layout.ranks, made.group)
    return _Moved.apply(x.movedim(dim, 0), routes, made).movedim(0, dim)


def shift(layout: Layout, x: Tensor, by: Any, dim: int, fill: float) -> Tensor:
    """See `Layout.shift`."""
    made = Made.by_all(
        SHIFT, layout, x, dim, layout.local, lambda: _integer(by), lambda: float(fill)
    )
    by = _integer(by)
    pieces = Pieces(layout.table, layout.ranks)
    wanted = [np.clip(pieces.of(r) + by, 0, layout.length) for r in range(layout.ranks)]
    kept = [w[w[:, 1] > w[:, 0]] for w in wanted]
    rows = _Moved.apply(x.movedim(dim, 0), Routes(pieces, kept, made.group), made)
    there = layout.positions.to(x.device) + by
    there = (there >= 0) & (there < layout.length)
    out = rows.new_full((layout.local, *rows.shape[1:]), fill)
    return out.index_put((there.nonzero()[:, 0],), rows).movedim(0, dim)


def _integer(by: Any) -> int:
    found = as_int(by)
    if found is None:
        raise ArgumentError(f"by={by!r} must be an integer")
    return found


class _Moved(torch.autograd.Function):
    """Rows `(local, ...)` fetched from other ranks; their gradients go home."""

    @staticmethod
    def forward(ctx, x, routes, made):
        ctx.routes, ctx.made, ctx.local = routes, made, x.shape[0]
        (found,) = Collective().fetch(routes, (_as_part(x),)).wait()
        return found.view(routes.rows[routes.me], *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyrefly: ignore[bad-override]
        ctx.made.backward()
        shape = ctx.local, *grad.shape[1:]
        total = torch.zeros(shape, dtype=acc_dtype(grad.dtype), device=grad.device)
        Collective().home(ctx.routes, (_as_part(grad),)).add_to((_as_part(total),))
        return total.to(grad.dtype), None, None


def _as_part(x: Tensor) -> Tensor:
    """(tokens, ...) as (1, 1, tokens, width)."""
    width = x[0].numel() if len(x) else int(np.prod(x.shape[1:]))
    return x.reshape(1, 1, x.shape[0], width)
