"""Read the rows of a call over a cache on the host, where its tensors are on the CPU."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..mods.evaluation.pointwise import Positions, mask_at
from ..types import Spec
from .base import Call, graphs, split


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


def rows_of(spec: Spec, call: Call) -> list[CacheRow]:
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
    q_len = call.q.shape[2]
    if kv.cu_q is None:
        all_queries = slice(0, q_len)
        rows = [CacheRow(n, n, all_queries, length) for n, length in enumerate(lengths) if q_len]
    else:
        rows = _packed_rows(kv.cu_q.tolist(), q_len, kv.max_q, lengths)
    if kv.page_table is not None:
        _check_pages(spec, call, kv.page_table, rows)
    return rows


def _packed_rows(cu_q: list[int], q_len: int, max_q: int, lengths: list[int]) -> list[CacheRow]:
    counts = [stop - start for start, stop in pairwise(cu_q)]
    if cu_q[0] or cu_q[-1] > q_len or min(counts, default=0) < 0 or max(counts, default=0) > max_q:
        raise ArgumentError(
            f"cu_q must rise from 0 to {q_len} tokens at most, by no more than max_q={max_q}, "
            f"got {cu_q if len(cu_q) < 12 else (cu_q[0], cu_q[-1])}"
        )
    return [
        CacheRow(n, 0, slice(start, stop), length)
        for n, (start, stop, length) in enumerate(zip(cu_q, cu_q[1:], lengths, strict=False))
        if stop > start
    ]


_MAX_PAIRS = 1 << 22  # of a mask, evaluated at once


def _check_pages(spec: Spec, call: Call, page_table: Tensor, rows: list[CacheRow]) -> None:
    """Raise for an entry of the page table that names no page, but has a key that a query sees."""
    page_count, page_len = call.k.shape[0], call.k.shape[2]
    invalid = (page_table < 0) | (page_table >= page_count)
    if not bool(invalid.any()):
        return
    _, mask = graphs(spec)
    _, captured = split(spec, call.captured)
    integers = lambda *ends: torch.arange(*ends, device=page_table.device)
    for row in rows:
        entries = invalid[row.index, : -(-row.length // page_len)].nonzero()[:, 0]
        step = max(1, _MAX_PAIRS // (page_len * row.query_count))
        for some in entries.split(step):
            keys = some[:, None] * page_len + integers(page_len)
            sees = torch.ones((), dtype=torch.bool, device=keys.device)
            if mask is not None:
                b, h = call.coords.b + row.index, call.coords.h
                positions = Positions(
                    integers(b, b + 1)[:, None, None, None],
                    integers(h, h + call.q.shape[1])[:, None, None],
                    integers(row.first_position, row.length)[:, None],
                    keys.flatten(),
                )
                sees = mask_at(mask, captured, positions)
            sees = sees.expand(*sees.shape[:-1], keys.numel()) if sees.dim() else sees
            of_entry = (sees.flatten(0, -2).any(0) if sees.dim() > 1 else sees).expand(keys.numel())
            wrong = (of_entry.view(keys.shape) & (keys < row.length)).any(1)
            if bool(wrong.any()):
                n = int(some[wrong][0])
                raise ArgumentError(
                    f"page_table[{row.index}, {n}] = {int(page_table[row.index, n])} is none of "
                    f"the {page_count} pages, but row {row.index} has {row.length} keys in pages "
                    f"of {page_len}, and a query attends to one of them there"
                )
