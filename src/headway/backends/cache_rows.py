"""Read the rows of a call over a cache on the host, where its tensors are on the CPU."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..types import KV
from .base import Call


class CacheRow(NamedTuple):
    """A row of the batch that has queries."""

    index: int  # in the batch and in the cache
    q_row: int  # its queries are q[q_row, :, queries]
    queries: slice
    length: int  # number of its keys, with those of its queries

    @property
    def query_count(self) -> int:
        """Return the number of its queries."""
        return self.queries.stop - self.queries.start

    @property
    def first_position(self) -> int:
        """Return the position of its first query."""
        return self.length - self.query_count


def rows_of(call: Call) -> list[CacheRow]:
    """Return the rows that have queries.

    **Raises:** `ArgumentError` for invalid lengths, offsets and pages.
    """
    kv = call.kv
    assert kv is not None
    lengths, capacity = kv.lengths.tolist(), kv.capacity(call.k)
    for n, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ArgumentError(
                f"lengths[{n}] = {length} is not from 0 to the capacity of the cache, {capacity}"
            )
    if kv.page_table is not None:
        _check_pages(kv, kv.page_table, call.k)
    q_len = call.q.shape[2]
    if kv.cu_q is None:
        all_queries = slice(0, q_len)
        return [CacheRow(n, n, all_queries, length) for n, length in enumerate(lengths) if q_len]
    cu_q = kv.cu_q.tolist()
    counts = [stop - start for start, stop in pairwise(cu_q)]
    if (
        cu_q[0]
        or cu_q[-1] > q_len
        or min(counts, default=0) < 0
        or max(counts, default=0) > kv.max_q
    ):
        raise ArgumentError(
            f"cu_q must rise from 0 to {q_len} tokens at most, by no more than max_q={kv.max_q}, "
            f"got {cu_q if len(cu_q) < 12 else (cu_q[0], cu_q[-1])}"
        )
    return [
        CacheRow(n, 0, slice(start, stop), length)
        for n, (start, stop, length) in enumerate(zip(cu_q, cu_q[1:], lengths, strict=False))
        if stop > start
    ]


def _check_pages(kv: KV, page_table: Tensor, k: Tensor) -> None:
    """Raise for an entry of the page table that a row needs and that names no page."""
    page_count, page_len = k.shape[0], k.shape[2]
    first_keys = torch.arange(page_table.shape[1], device=page_table.device) * page_len
    invalid = (page_table < 0) | (page_table >= page_count)
    invalid &= first_keys < kv.lengths[:, None]
    if bool(invalid.any()):
        row, n = invalid.nonzero()[0].tolist()
        raise ArgumentError(
            f"page_table[{row}, {n}] = {int(page_table[row, n])} is none of the {page_count} "
            f"pages, but row {row} has {int(kv.lengths[row])} keys in pages of {page_len}"
        )
