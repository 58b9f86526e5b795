"""Keys and values of a few rows as one tensor: cut out of a cache, gathered from pages, widened."""

import math

import torch
from torch import Tensor

from ...types import acc_dtype
from ..base import Call


class Keys:
    """Reads a block at a time, into memory that the next block uses again: new pages of memory cost
    as much as copies."""

    def __init__(self, call: Call) -> None:
        self.call, self.kv, self.acc = call, call.kv, acc_dtype(call.q.dtype)
        self.paged = call.kv is not None and call.kv.page_table is not None
        self.copied = self.paged or call.k.dtype != self.acc
        self._memory: dict[object, Tensor] = {}

    def scratch(self, key: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory under a name, of any numbers; what the name had before is lost."""
        size, kept = math.prod(shape), self._memory.get(key)
        if kept is None or kept.numel() < size or kept.dtype != dtype:
            kept = self._memory[key] = torch.empty(size, dtype=dtype, device="cpu")
        return kept[:size].view(shape)

    def k(self, rows: slice, heads: slice, keys: slice) -> Tensor:
        """`(rows * heads, keys, d)` in the accumulation dtype, times its scale."""
        scale = None if self.kv is None else self.kv.k_scale
        return self._read(self.call.k, scale, rows, heads, keys)

    def v(self, rows: slice, heads: slice, keys: slice) -> Tensor:
        """`(rows * heads, keys, dv)`, as `k`."""
        scale = None if self.kv is None else self.kv.v_scale
        return self._read(self.call.v, scale, rows, heads, keys)

    def _read(
        self, x: Tensor, scale: Tensor | None, rows: slice, heads: slice, keys: slice
    ) -> Tensor:
        own = self.as_it_is(x, rows, heads, keys)
        if own.dtype != self.acc:
            own = self.scratch("wide", tuple(own.shape), self.acc).copy_(own)
        if scale is not None:
            own = own * scale[rows, heads, None, None].to(self.acc)
        return own.flatten(0, 1)

    def as_it_is(self, x: Tensor, rows: slice, heads: slice, keys: slice) -> Tensor:
        """`(rows, heads, keys, width)` of k or v: a view, or from (pages, heads, page, width),
        copied once."""
        kv, dtype = self.kv, x.dtype
        if kv is None or kv.page_table is None:
            return x[rows, heads, keys]
        memory = ("pages", x is self.call.v)
        if dtype == torch.float8_e4m3fn:  # PyTorch selects none
            x = x.view(torch.uint8)
        count, hk, page, width = x.shape
        start = keys.start // page
        pages = kv.page_table[rows, start : -(-keys.stop // page)].long()
        if len(pages) > 1:  # behind the last page of a shorter row is anything
            pages = pages.clamp(0, count - 1)
        h = torch.arange(heads.start, heads.stop, device="cpu")[:, None]
        if x.is_contiguous():  # a page of a head is one piece
            pieces, at = x.view(count * hk, page * width), pages[:, None] * hk + h
        elif x.transpose(1, 2).is_contiguous():  # a key of a head is
            of_keys = (pages[..., None] * page + torch.arange(page, device="cpu")).flatten(1)
            pieces = x.transpose(1, 2).view(count * page * hk, width)
            at = of_keys[:, None] * hk + h
        else:
            pieces, at = None, h
        if pieces is None:
            own = x[:, heads].index_select(0, pages.flatten())
            own = own.unflatten(0, pages.shape).transpose(1, 2)
        else:
            own = self.scratch(memory, (at.numel(), pieces.shape[1]), x.dtype)
            torch.index_select(pieces, 0, at.flatten(), out=own)
        own = own.reshape(len(pages), len(h), pages.shape[1] * page, width).view(dtype)
        return own[:, :, keys.start - start * page : keys.stop - start * page]
