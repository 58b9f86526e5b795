"""A layout's tensors, from rank to rank: `Layout.unshard` and `Layout.shift` under autograd."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError
from ..layout import NO_MESH, Layout
from .routes import Gathering, Pieces, Routes


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
    routes = Gathering(Pieces(layout.table, layout.ranks), group_of(layout), x.device)
    return _Moved.apply(x.movedim(dim, 0), routes).movedim(0, dim)


def shift(layout: Layout, x: Tensor, by: int, dim: int, fill: float) -> Tensor:
    """See `Layout.shift`."""
    pieces = Pieces(layout.table, layout.ranks)
    wanted = [np.clip(pieces.of(r) + by, 0, layout.length) for r in range(layout.ranks)]
    kept = [w[w[:, 1] > w[:, 0]] for w in wanted]
    routes = Routes(pieces, kept, group_of(layout), x.device)
    rows = _Moved.apply(x.movedim(dim, 0), routes)
    there = layout.positions.to(x.device) + by
    there = (there >= 0) & (there < layout.length)
    out = rows.new_full((layout.local, *rows.shape[1:]), fill)
    return out.index_put((there.nonzero()[:, 0],), rows).movedim(0, dim)


class _Moved(torch.autograd.Function):
    """Rows fetched from other ranks; their gradients go home."""

    @staticmethod
    def forward(ctx, x, routes):
        ctx.routes, ctx.local = routes, x.shape[0]
        return routes.fetch(x.contiguous()).wait()

    @staticmethod
    def backward(ctx, grad):  # pyrefly: ignore[bad-override]
        total = grad.new_zeros((ctx.local, *grad.shape[1:]))
        ctx.routes.home(grad).add_to(total)
        return total, None
