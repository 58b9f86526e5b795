"""Range minimum and maximum queries on a captured tensor, for many boxes of indices at once.

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

_MAX_BYTES = 64 << 20  # of one sparse table

Box = list[tuple[Tensor, Tensor]]  # least and greatest index, dimension by dimension


class TableBounds:
    """A captured tensor that returns bounds of `table[indices]` from bounds of the indices."""

    def __init__(self, table: Tensor) -> None:
        self.table = table.detach()
        self._windows: dict[tuple[int, ...], _Windows] = {}

    def __call__(self, indices: list[Bounds]) -> tuple[Bounds, Tensor]:
        """Return the bounds, and whether an index may be out of range, where it is clamped."""
        table, outside = self.table, torch.zeros((), dtype=torch.bool, device=self.table.device)
        if table.numel() == 0:
            return anything(DTYPE_NAMES[table.dtype]), ~outside
        box: Box = []
        for (low, high), size in zip(indices, table.shape, strict=True):
            lo, hi = (torch.as_tensor(x, device=table.device) for x in (low, high))
            outside = outside | (lo < -size) | (hi >= size)
            # A negative index counts from the end; a box across zero covers the whole dimension.
            crosses_zero = (lo < 0) & (hi >= 0)
            lo, hi = (torch.where(x < 0, x + size, x).clamp(0, size - 1) for x in (lo, hi))
            box.append((torch.where(crosses_zero, 0, lo), torch.where(crosses_zero, size - 1, hi)))
        points = _as_int64(table[tuple(lo for lo, _ in box)])
        wide_dims = tuple(d for d, (lo, hi) in enumerate(box) if bool((lo < hi).any()))
        if not wide_dims:
            return Bounds(points, points), outside
        if wide_dims not in self._windows:
            self._windows[wide_dims] = _Windows(table, wide_dims)
        lo, hi = self._windows[wide_dims](box)
        is_point = torch.stack(torch.broadcast_tensors(*(lo == hi for lo, hi in box))).all(0)
        bounds = Bounds(torch.where(is_point, points, lo), torch.where(is_point, points, hi))
        return bounds, outside


class _Windows:
    """A sparse table: minima and maxima over all windows of 2^k blocks along some dimensions."""

    def __init__(self, table: Tensor, dims: tuple[int, ...]) -> None:
        self.dims, self.shift = dims, 0  # blocks of 2^shift entries along each of the dimensions
        while self._bytes(table) > _MAX_BYTES:
            self.shift += 1
        minima = _reduce_blocks(table, dims, 1 << self.shift, torch.amin)
        maxima = _reduce_blocks(table, dims, 1 << self.shift, torch.amax)
        self.shape = minima.shape
        self.minima = _all_windows(torch.minimum, minima, dims).flatten()
        self.maxima = _all_windows(torch.maximum, maxima, dims).flatten()

    def _bytes(self, table: Tensor) -> int:
        sizes = [-(-n >> self.shift) if d in self.dims else n for d, n in enumerate(table.shape)]
        levels = [sizes[d].bit_length() for d in self.dims]
        return math.prod(sizes) * math.prod(levels) * table.element_size()

    def __call__(self, box: Box) -> Bounds:
        """Read the windows that cover each box: at its low and high end in each dimension."""
        base = torch.zeros((), dtype=torch.int64, device=self.minima.device)
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
        lo, hi = self.minima[corners[0]], self.maxima[corners[0]]
        for corner in corners[1:]:
            lo = torch.minimum(lo, self.minima[corner])
            hi = torch.maximum(hi, self.maxima[corner])
        return Bounds(_as_int64(lo), _as_int64(hi))


def _reduce_blocks(table: Tensor, dims: tuple[int, ...], size: int, reduce: Callable) -> Tensor:
    """Reduce every block of `size` along `dims` to one number; the last block may be shorter."""
    if size > 1:
        for dim in dims:
            full_length = table.shape[dim] // size * size
            full_blocks = table.narrow(dim, 0, full_length).unflatten(dim, (-1, size))
            blocks = [reduce(full_blocks, dim + 1)]
            if full_length < table.shape[dim]:
                remainder = table.narrow(dim, full_length, table.shape[dim] - full_length)
                blocks.append(reduce(remainder, dim, keepdim=True))
            table = torch.cat(blocks, dim)
    return table


def _all_windows(combine: Callable, table: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return `(levels, ..., *table.shape)`: level k holds windows of 2^k, for each of `dims`."""
    for n, dim in enumerate(reversed(dims)):
        axis = dim + n  # each pass adds a leading axis
        levels, size = [table], table.shape[axis]
        for k in range(1, size.bit_length()):
            half = 1 << (k - 1)
            # Windows past the end repeat their first half; no box reads them.
            second_half = levels[-1].narrow(axis, half, size - half)
            past_end = levels[-1].narrow(axis, size - half, half)
            levels.append(combine(levels[-1], torch.cat([second_half, past_end], axis)))
        table = torch.stack(levels)
    return table


def _as_int64(values: Tensor) -> Tensor:
    """Return integers as int64, as all bounds are; other dtypes unchanged."""
    return values if values.is_floating_point() or values.dtype == torch.bool else values.long()
