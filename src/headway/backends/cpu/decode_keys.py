"""Read keys and values of a few rows as one tensor: cut out of a cache, gathered from pages,
widened."""

import math

import torch
from torch import Tensor

from ...types import acc_dtype
from ..base import Call


class KeyReader:
    """A reader of keys and values, a block at a time. Blocks share memory, since fresh memory costs
    as much as a copy."""

    def __init__(self, call: Call) -> None:
        self.call, self.kv, self.acc = call, call.kv, acc_dtype(call.q.dtype)
        self.paged = call.kv is not None and call.kv.page_table is not None
        self.copied = self.paged or call.k.dtype != self.acc
        self._buffers: dict[object, Tensor] = {}

    def scratch(self, key: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the uninitialised buffer of that key; its previous contents are lost."""
        size, buffer = math.prod(shape), self._buffers.get(key)
        if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer[:size].view(shape)

    def k(self, rows: slice, heads: slice, keys: slice) -> Tensor:
        """Return keys `(rows * heads, keys, d)` in the accumulation dtype, times their scale."""
        scale = None if self.kv is None else self.kv.k_scale
        return self._read(self.call.k, scale, rows, heads, keys)

    def v(self, rows: slice, heads: slice, keys: slice) -> Tensor:
        """Return values `(rows * heads, keys, dv)`, as `k`."""
        scale = None if self.kv is None else self.kv.v_scale
        return self._read(self.call.v, scale, rows, heads, keys)

    def _read(
        self, cache: Tensor, scale: Tensor | None, rows: slice, heads: slice, keys: slice
    ) -> Tensor:
        block = self.stored(cache, rows, heads, keys)
        if block.dtype != self.acc:
            block = self.scratch("wide", tuple(block.shape), self.acc).copy_(block)
        if scale is not None:
            block = block * scale[rows, heads, None, None].to(self.acc)
        return block.flatten(0, 1)

    def stored(self, cache: Tensor, rows: slice, heads: slice, keys: slice) -> Tensor:
        """Return `(rows, heads, keys, width)` of k or v as they are stored, with neither widening
        nor scale: a view, or a copy from pages `(pages, heads, page, width)`."""
        kv, dtype = self.kv, cache.dtype
        if kv is None or kv.page_table is None:
            return cache[rows, heads, keys]
        buffer_key = ("pages", cache is self.call.v)
        if dtype == torch.float8_e4m3fn:  # PyTorch has no index_select of float8
            cache = cache.view(torch.uint8)
        page_count, hk, page_len, width = cache.shape
        first_page = keys.start // page_len
        page_ids = kv.page_table[rows, first_page : -(-keys.stop // page_len)].long()
        if len(page_ids) > 1:  # entries after the last page of a shorter row may be anything
            page_ids = page_ids.clamp(0, page_count - 1)
        head_ids = torch.arange(heads.start, heads.stop, device="cpu")[:, None]
        if cache.is_contiguous():  # one head of a page is contiguous
            sources = cache.view(page_count * hk, page_len * width)
            source_ids = page_ids[:, None] * hk + head_ids
        elif cache.transpose(1, 2).is_contiguous():  # one head of a key is contiguous
            offsets = torch.arange(page_len, device="cpu")
            key_ids = (page_ids[..., None] * page_len + offsets).flatten(1)
            sources = cache.transpose(1, 2).view(page_count * page_len * hk, width)
            source_ids = key_ids[:, None] * hk + head_ids
        else:
            sources, source_ids = None, head_ids
        if sources is None:
            block = cache[:, heads].index_select(0, page_ids.flatten())
            block = block.unflatten(0, page_ids.shape).transpose(1, 2)
        else:
            shape = (source_ids.numel(), sources.shape[1])
            block = self.scratch(buffer_key, shape, cache.dtype)
            torch.index_select(sources, 0, source_ids.flatten(), out=block)
        shape = len(page_ids), len(head_ids), page_ids.shape[1] * page_len, width
        block = block.reshape(shape).view(dtype)
        return block[:, :, keys.start - first_page * page_len : keys.stop - first_page * page_len]
