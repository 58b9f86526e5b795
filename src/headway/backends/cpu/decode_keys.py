"""Read keys and values of a few rows: cut out of a cache, gathered from pages, widened. Or attend
to pages as they lie."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from ...types import acc_dtype
from ..base import Call
from .flash import _finite, _forward, _some_zero

_MIN_COLUMN_BYTES = 64  # of a page; products of fewer keys take longer than copies
_MAX_GAP_NUMBERS = 1 << 16  # numbers of others' pages that are read to save a launch


class KeyReader:
    """A reader of keys and values, a block at a time. Blocks share memory, since fresh memory costs
    as much as a copy."""

    def __init__(self, call: Call) -> None:
        self.call, self.kv, self.acc = call, call.kv, acc_dtype(call.q.dtype)
        self.paged = call.kv is not None and call.kv.page_table is not None
        scaled = call.kv is not None and not call.kv.k_scale is call.kv.v_scale is None
        self.copied = self.paged or scaled or call.k.dtype != self.acc
        self.apart = True  # whether a block's keys are read again after its values are
        self._buffers: dict[object, Tensor] = {}

    def k(self, rows: slice, heads: slice, keys: slice) -> Tensor:
        """Return keys `(rows, heads, keys, d)` in the accumulation dtype, times their scale."""
        scale = None if self.kv is None else self.kv.k_scale
        return self._read(self.call.k, scale, rows, heads, keys)

    def v(self, rows: slice, heads: slice, keys: slice) -> Tensor:
        """Return values `(rows, heads, keys, dv)`, as `k`."""
        scale = None if self.kv is None else self.kv.v_scale
        return self._read(self.call.v, scale, rows, heads, keys)

    def _read(
        self, cache: Tensor, scale: Tensor | None, rows: slice, heads: slice, keys: slice
    ) -> Tensor:
        block = self._gather(cache, rows, heads, keys) if self.paged else cache[rows, heads, keys]
        if block.dtype != self.acc:
            apart = self.apart and cache is self.call.v
            scratch = self._scratch(("wide", apart), block.shape, self.acc)
            block = scratch.copy_(block)
        if scale is not None:
            block = block * scale[rows, heads, None, None].to(self.acc)
        return block

    def _scratch(self, key: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the uninitialised buffer of that key; its previous contents are lost."""
        size, buffer = math.prod(shape), self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer[:size].view(shape)

    def _gather(self, cache: Tensor, rows: slice, heads: slice, keys: slice) -> Tensor:
        """Return `(rows, heads, keys, width)`, copied from pages `(pages, heads, page, width)`."""
        dtype, (page_count, hk, page_len, width) = cache.dtype, cache.shape
        scratch_key = "pages", cache is self.call.v
        if dtype.itemsize == 1:  # PyTorch has no index_select of float8
            cache = cache.view(torch.uint8)
        first_page = keys.start // page_len
        page_table = self.kv.page_table  # type: ignore[union-attr]
        page_ids = page_table[rows, first_page : -(-keys.stop // page_len)].long()  # type: ignore[index]
        missing = None  # entries of pages that nobody sees may be anything
        low, high = (int(n) for n in page_ids.aminmax()) if page_ids.numel() else (0, 0)
        if low < 0 or high >= page_count:
            missing = (page_ids < 0) | (page_ids >= page_count)
            page_ids = page_ids.masked_fill(missing, 0)
        head_ids = torch.arange(heads.start, heads.stop, device="cpu")[:, None]
        shape = len(page_ids), len(head_ids), page_ids.shape[1] * page_len, width
        if cache.is_contiguous():  # one head of a page is contiguous
            sources = cache.view(page_count * hk, page_len * width)
            source_ids = page_ids[:, None] * hk + head_ids
        else:  # one head of a key
            offsets = torch.arange(page_len, device="cpu")
            key_ids = (page_ids[..., None] * page_len + offsets).flatten(1)
            sources = cache.transpose(1, 2).reshape(page_count * page_len * hk, width)
            source_ids = key_ids[:, None] * hk + head_ids
        block = self._scratch(scratch_key, shape, cache.dtype)
        out = block.view(source_ids.numel(), sources.shape[1])
        torch.index_select(sources, 0, source_ids.flatten(), out=out)
        if missing is not None:  # no numbers of other rows, which may be NaN
            by_page = block.view(*shape[:2], -1, page_len * width)
            by_page.masked_fill_(missing[:, None, :, None], 0)
        return block.view(dtype)[
            :, :, keys.start - first_page * page_len : keys.stop - first_page * page_len
        ]


def attend_by_page(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, limits: list[tuple[int, int]], scale: float
) -> tuple[Tensor, Tensor] | None:
    """Return out and lse of q `(b, hk, queries, d)` over pages `(pages, hk, page, d)` as they lie,
    each row over its keys `start:stop`.

    Every page is an entry of the kernel's batch, with the queries of the row that owns it: copies
    would cost as much as the products. Return None where gathering is faster, because pages are
    small, shared by rows or far apart, and where the results may be wrong.
    """
    page_len = k.shape[2]
    if page_len * k.element_size() < _MIN_COLUMN_BYTES:
        return None
    spans = [(start // page_len, -(-stop // page_len)) for start, stop in limits]
    counts = [stop - start for start, stop in spans]
    ids = torch.cat([page_table[n, start:stop] for n, (start, stop) in enumerate(spans)]).long()
    rows = torch.arange(len(q), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    # The stretches of memory that hold these pages and few others.
    ordered, order = ids.sort()
    steps = ordered.diff()
    gap = 1 + _MAX_GAP_NUMBERS // (page_len * k.shape[1] * (k.shape[3] + v.shape[3]))
    cuts = (steps > gap).nonzero()[:, 0] + 1
    if bool((steps == 0).any()) or 8 * len(cuts) > len(ids):
        return None
    bias = _hidden_keys(limits, spans, rows, page_len, q.dtype)
    results: list[tuple[Tensor, Tensor]] = []
    result_places = torch.empty_like(ids)
    for numbers in order.tensor_split(cuts):
        first, last = int(ids[numbers[0]]), int(ids[numbers[-1]])
        places = ids[numbers] - first
        owners = torch.zeros(last + 1 - first, dtype=torch.int64, device="cpu")
        owners[places] = rows[numbers]
        stretch_bias = None
        if bias is not None:
            stretch_bias = q.new_zeros(len(owners), 1, 1, page_len)
            stretch_bias[places, 0, 0] = bias[numbers]
        pages = slice(first, last + 1)
        results.append(
            _forward(
                q.index_select(0, owners),
                k[pages],
                v[pages],
                0.0,
                False,
                attn_mask=stretch_bias,
                scale=scale,
            )
        )
        result_places[numbers] = places + sum(len(lse) for _, lse in results[:-1])
    outs, lses = (
        (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, result_places)
        for parts in zip(*results, strict=True)
    )
    # A mask that is added lets NaN and inf through.
    if (bias is not None and not _finite(outs)) or (
        _some_zero(lses) and not (_finite(q) and _finite(k))
    ):
        return None
    merged, merged_lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf)
    stops = torch.tensor([0, *counts], device="cpu").cumsum(0).tolist()
    for n, (start, stop) in enumerate(pairwise(stops)):
        if start < stop:
            merged_lse[n] = lses[start:stop].logsumexp(0)
            weights = (lses[start:stop] - merged_lse[n]).exp_()
            merged[n] = torch.einsum("phi,phid->hid", weights, outs[start:stop])
    return merged, merged_lse


def _hidden_keys(
    limits: list[tuple[int, int]], spans: list[tuple[int, int]], rows: Tensor, page_len: int,
    dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """Return -inf at keys of pages that their row does not see, else 0, (pages of all rows, page);
    None if every page is seen whole."""
    if all(start % page_len == 0 == stop % page_len for start, stop in limits):
        return None
    start, stop = torch.tensor(limits, device="cpu")[rows, :, None].unbind(1)
    pages = torch.cat([torch.arange(*span, device="cpu") for span in spans])
    keys = pages[:, None] * page_len + torch.arange(page_len, device="cpu")
    hidden = (keys < start) | (keys >= stop)
    return torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, -math.inf)
