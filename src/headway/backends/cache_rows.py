"""The rows of a call over a cache, as the host sees them where tensors are on the CPU."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..types import KV
from .base import Call


class Row(NamedTuple):
    """One row of the batch with queries."""

    n: int  # its number
    of: int  # where its queries are: q[of, :, i]
    i: slice
    length: int  # its keys, the queries' own among them

    @property
    def first(self) -> int:
        """The position of its first query."""
        return self.length - (self.i.stop - self.i.start)


def rows_of(call: Call) -> list[Row]:
    """The rows that have queries.

    **Raises:** `ArgumentError` for lengths, offsets and pages that cannot be.
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
        whole = slice(0, q_len)
        return [Row(n, n, whole, length) for n, length in enumerate(lengths) if q_len]
    ends = kv.cu_q.tolist()
    counts = [stop - start for start, stop in pairwise(ends)]
    if (
        ends[0]
        or ends[-1] > q_len
        or min(counts, default=0) < 0
        or max(counts, default=0) > kv.max_q
    ):
        raise ArgumentError(
            f"cu_q must rise from 0 to {q_len} tokens at most, by no more than max_q={kv.max_q}, "
            f"got {ends if len(ends) < 12 else (ends[0], ends[-1])}"
        )
    return [
        Row(n, 0, slice(start, stop), length)
        for n, (start, stop, length) in enumerate(zip(ends, ends[1:], lengths, strict=False))
        if stop > start
    ]


def _check_pages(kv: KV, table: Tensor, k: Tensor) -> None:
    pages, page = k.shape[0], k.shape[2]
    used = torch.arange(table.shape[1], device=table.device) * page < kv.lengths[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        row, at = wrong.nonzero()[0].tolist()
        raise ArgumentError(
            f"page_table[{row}, {at}] = {int(table[row, at])} is none of the {pages} pages, but "
            f"row {row} has {int(kv.lengths[row])} keys in pages of {page}"
        )
