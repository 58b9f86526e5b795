"""The least and greatest number in a box of a captured tensor, for many boxes at once.

A mask such as `keep[h, q_idx - kv_idx]` or `layout[q_idx // 64, kv_idx // 64]` reads a captured
tensor at an index that mixes both positions: over a tile of pairs, anywhere in a box of indices.
A sparse table answers each box in constant time: the minimum over every window whose widths are
powers of two is computed once, and a box is covered by 2 overlapping windows per dimension. Of a
large tensor (a dense mask, say) the table is made of blocks, and boxes are widened to whole blocks.

(Bender & Farach-Colton 2000, The LCA problem revisited, section 3)
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..graph import DTYPE_NAMES
from .rules import Bounds, anything

_MOST = 64 << 20  # bytes of one sparse table

Box = list[tuple[Tensor, Tensor]]  # least and greatest index, dimension by dimension


class TableBounds:
    """Bounds of `table[indices]` from bounds of the indices."""

    def __init__(self, table: Tensor) -> None:
        self.table = table.detach()
        self._windows: dict[tuple[int, ...], _Windows] = {}

    def __call__(self, indices: list[Bounds]) -> tuple[Bounds, Tensor]:
        """The bounds, and whether an index may be out of range (where reading clamps it)."""
        table, outside = self.table, torch.zeros((), dtype=torch.bool, device=self.table.device)
        if table.numel() == 0:
            return anything(DTYPE_NAMES[table.dtype]), ~outside
        box: Box = []
        for (low, high), size in zip(indices, table.shape, strict=True):
            lo, hi = (torch.as_tensor(x, device=table.device) for x in (low, high))
            outside = outside | (lo < -size) | (hi >= size)
            # A negative index counts from the end; a box across zero may be anywhere.
            across = (lo < 0) & (hi >= 0)
            lo, hi = (torch.where(x < 0, x + size, x).clamp(0, size - 1) for x in (lo, hi))
            box.append((torch.where(across, 0, lo), torch.where(across, size - 1, hi)))
        points = _wide(table[tuple(lo for lo, _ in box)])
        wide = tuple(d for d, (lo, hi) in enumerate(box) if bool((lo < hi).any()))
        if not wide:
            return Bounds(points, points), outside
        if wide not in self._windows:
            self._windows[wide] = _Windows(table, wide)
        lo, hi = self._windows[wide](box)
        point = torch.stack(torch.broadcast_tensors(*(lo == hi for lo, hi in box))).all(0)
        return Bounds(torch.where(point, points, lo), torch.where(point, points, hi)), outside


class _Windows:
    """The minima and maxima over all windows of 2^k blocks along some dimensions of a table."""

    def __init__(self, table: Tensor, dims: tuple[int, ...]) -> None:
        self.dims, self.shift = dims, 0  # blocks of 2^shift entries along each of the dimensions
        while self._bytes(table) > _MOST:
            self.shift += 1
        least = _blocks(table, dims, 1 << self.shift, torch.amin)
        most = _blocks(table, dims, 1 << self.shift, torch.amax)
        self.shape = least.shape
        self.least = _doubled(torch.minimum, least, dims).flatten()
        self.most = _doubled(torch.maximum, most, dims).flatten()

    def _bytes(self, table: Tensor) -> int:
        sizes = [-(-n >> self.shift) if d in self.dims else n for d, n in enumerate(table.shape)]
        levels = [sizes[d].bit_length() for d in self.dims]
        return math.prod(sizes) * math.prod(levels) * table.element_size()

    def __call__(self, box: Box) -> Bounds:
        """Read the windows that cover each box: at its low and high end in each dimension."""
        base = torch.zeros((), dtype=torch.int64, device=self.least.device)
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(box))]
        stride = self.shape.numel()
        ends = []
        for d, (lo, _) in enumerate(box):
            if d not in self.dims:
                base = base + lo * strides[d]
        for d in reversed(self.dims):
            lo, hi = (x >> self.shift for x in box[d])
            level = torch.frexp((hi - lo + 1).double()).exponent.long() - 1  # floor(log2), exactly
            base = base + level * stride
            stride *= self.shape[d].bit_length()
            ends.append((lo * strides[d], (hi + 1 - (1 << level)) * strides[d]))
        corners = [base + sum(corner) for corner in itertools.product(*ends)]
        lo, hi = self.least[corners[0]], self.most[corners[0]]
        for at in corners[1:]:
            lo, hi = torch.minimum(lo, self.least[at]), torch.maximum(hi, self.most[at])
        return Bounds(_wide(lo), _wide(hi))


def _blocks(table: Tensor, dims: tuple[int, ...], size: int, reduce: Callable) -> Tensor:
    """Every block of `size` along `dims` as one number; the last may be shorter."""
    if size > 1:
        for dim in dims:
            whole = table.shape[dim] // size * size
            parts = [reduce(table.narrow(dim, 0, whole).unflatten(dim, (-1, size)), dim + 1)]
            if whole < table.shape[dim]:
                rest = table.narrow(dim, whole, table.shape[dim] - whole)
                parts.append(reduce(rest, dim, keepdim=True))
            table = torch.cat(parts, dim)
    return table


def _doubled(least: Callable, table: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`(levels, ..., *table.shape)`: level k holds the windows of 2^k, for each of `dims`."""
    for n, dim in enumerate(reversed(dims)):
        axis = dim + n  # each pass adds a leading axis
        levels, size = [table], table.shape[axis]
        for k in range(1, size.bit_length()):
            half = 1 << (k - 1)
            # Windows that stick out repeat their first half; no box asks for them.
            beyond = levels[-1].narrow(axis, half, size - half)
            last = levels[-1].narrow(axis, size - half, half)
            levels.append(least(levels[-1], torch.cat([beyond, last], axis)))
        table = torch.stack(levels)
    return table


def _wide(x: Tensor) -> Tensor:
    """Integers as int64, as all bounds are."""
    return x if x.is_floating_point() or x.dtype == torch.bool else x.long()
