"""A layout's tensors, from rank to rank: `Layout.unshard` and `Layout.shift` under autograd."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError
from ...types import acc_dtype
from ..layout import NO_MESH, Layout
from .collective import Collective
from .routes import Pieces, Routes


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


def unshard(layout: Layout, x: Tensor, dim: int) -> Tensor:
    """See `Layout.unshard`."""
    everything = np.array([[0, layout.length]])
    routes = Routes(
        Pieces(layout.table, layout.ranks), [everything] * layout.ranks, group_of(layout)
    )
    return _Moved.apply(x.movedim(dim, 0), routes).movedim(0, dim)


def shift(layout: Layout, x: Tensor, by: int, dim: int, fill: float) -> Tensor:
    """See `Layout.shift`."""
    pieces = Pieces(layout.table, layout.ranks)
    wanted = [np.clip(pieces.of(r) + by, 0, layout.length) for r in range(layout.ranks)]
    kept = [w[w[:, 1] > w[:, 0]] for w in wanted]
    rows = _Moved.apply(x.movedim(dim, 0), Routes(pieces, kept, group_of(layout)))
    there = layout.positions.to(x.device) + by
    there = (there >= 0) & (there < layout.length)
    out = rows.new_full((layout.local, *rows.shape[1:]), fill)
    return out.index_put((there.nonzero()[:, 0],), rows).movedim(0, dim)


class _Moved(torch.autograd.Function):
    """Rows `(local, ...)` fetched from other ranks; their gradients go home."""

    @staticmethod
    def forward(ctx, x, routes):
        ctx.routes, ctx.local = routes, x.shape[0]
        (found,) = Collective().fetch(routes, (_as_part(x),)).wait()
        return found.view(routes.rows[routes.me], *x.shape[1:])

    @staticmethod
    def backward(ctx, grad):  # pyrefly: ignore[bad-override]
        shape = ctx.local, *grad.shape[1:]
        total = torch.zeros(shape, dtype=acc_dtype(grad.dtype), device=grad.device)
        Collective().home(ctx.routes, (_as_part(grad),)).add_to((_as_part(total),))
        return total.to(grad.dtype), None


def _as_part(x: Tensor) -> Tensor:
    """(tokens, ...) as (1, 1, tokens, width)."""
    width = x[0].numel() if len(x) else int(np.prod(x.shape[1:]))
    return x.reshape(1, 1, x.shape[0], width)
