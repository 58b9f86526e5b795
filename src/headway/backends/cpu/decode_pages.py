"""Decode over pages without copying them.

Every page is an entry of the batch: PyTorch's flash kernel runs over the pages as they lie, each
with the queries of the row that owns it, and the results of a row's pages are merged by their
log-sum-exp. Gathering the pages would cost a copy of all that is read. Pages of which a row sees a
part only are few, and copied.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...types import acc_dtype
from .flash import _finite, _forward, _some_zero
from .key_ranges import KeyRange

_MIN_COLUMN_BYTES = 64  # of a page; products of fewer keys take longer than copies
_MAX_GAP_NUMBERS = 1 << 16  # numbers of others' pages that are read to save a launch


class _CutPage(NamedTuple):
    """A page of which its row sees the keys `start:stop`."""

    row: int
    index: int  # in the row of the page table
    start: int
    stop: int


class _SeenPages(NamedTuple):
    """The pages that rows see. A slot numbers the pages of one row; whole pages come first."""

    rows: list[int]  # of every whole page, then of every cut one
    slots: list[int]
    whole_ids: Tensor  # int64
    cut: list[_CutPage]


def attend_by_page(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, ranges: list[KeyRange | None],
    scale: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return out and lse of q `(b, hk, queries, d)` over pages `(pages, hk, page, d)`, each row
    over one range of its keys or none. Return None where gathering is faster, because pages are
    small, shared by rows or far apart, and where the kernel may hide a NaN."""
    page_len = k.shape[2]
    if page_len * k.element_size() < _MIN_COLUMN_BYTES:
        return None
    seen_pages = _seen_pages(page_table, ranges, page_len)
    page_numbers = page_len * k.shape[1] * (k.shape[3] + v.shape[3])
    stretches = _stretches(seen_pages.whole_ids, page_numbers)
    if stretches is None:
        return None
    results, places = _attend_whole_pages(q, k, v, seen_pages, stretches, scale)
    page_count = sum(stop - start for start, stop in stretches)
    if seen_pages.cut:
        results.append(_attend_cut_pages(q, k, v, page_table, seen_pages.cut, scale))
        cut_places = torch.arange(page_count, page_count + len(seen_pages.cut), device="cpu")
        places = torch.cat([places, cut_places])
        page_count += len(seen_pages.cut)
    return _merge_pages(q, k, seen_pages, results, places, page_count)


def _seen_pages(page_table: Tensor, ranges: list[KeyRange | None], page_len: int) -> _SeenPages:
    """Return the pages of all rows: those seen whole, and those seen in part."""
    rows: list[int] = []
    slots: list[int] = []
    whole_ids: list[Tensor] = []
    cut: list[_CutPage] = []
    cut_slots: list[int] = []
    for row, key_range in enumerate(ranges):
        if key_range is None:
            continue
        first_whole, end_whole = -(-key_range.start // page_len), key_range.stop // page_len
        count = max(0, end_whole - first_whole)
        if count:
            whole_ids.append(page_table[row, first_whole:end_whole])
            rows += [row] * count
            slots += range(count)
        for n in sorted({key_range.start // page_len, (key_range.stop - 1) // page_len}):
            if not first_whole <= n < end_whole:
                start, stop = key_range.start - n * page_len, key_range.stop - n * page_len
                cut.append(_CutPage(row, n, max(start, 0), min(stop, page_len)))
                cut_slots.append(count)
                count += 1
    no_ids = torch.empty(0, dtype=torch.int64, device="cpu")
    ids = torch.cat(whole_ids).long() if whole_ids else no_ids
    return _SeenPages(rows + [page.row for page in cut], slots + cut_slots, ids, cut)


def _stretches(page_ids: Tensor, page_numbers: int) -> list[tuple[int, int]] | None:
    """Return stretches of memory that hold these pages and few others; None for many stretches, or
    where a page occurs twice."""
    if not len(page_ids):
        return []
    ordered = page_ids.sort().values
    steps = ordered.diff()
    if bool((steps == 0).any()):
        return None
    ends = (steps > 1 + _MAX_GAP_NUMBERS // page_numbers).nonzero()[:, 0]
    if 8 * len(ends) > len(page_ids):
        return None
    starts = [int(ordered[0]), *ordered[ends + 1].tolist()]
    stops = [*(ordered[ends] + 1).tolist(), int(ordered[-1]) + 1]
    return list(zip(starts, stops, strict=True))


def _attend_whole_pages(
    q: Tensor, k: Tensor, v: Tensor, seen_pages: _SeenPages, stretches: list[tuple[int, int]],
    scale: float,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:  # fmt: skip
    """Return out and lse of all pages of each stretch, and the place of every seen page among
    them."""
    ids = seen_pages.whole_ids
    row_of_page = torch.tensor(seen_pages.rows[: len(ids)], dtype=torch.int64, device="cpu")
    places = torch.empty_like(ids)
    results: list[tuple[Tensor, Tensor]] = []
    first_place = 0
    for start, stop in stretches:
        inside: slice | Tensor = slice(None)
        if len(stretches) > 1:
            inside = ((ids >= start) & (ids < stop)).nonzero()[:, 0]
        q_rows = torch.zeros(stop - start, dtype=torch.int64, device="cpu")
        q_rows[ids[inside] - start] = row_of_page[inside]
        page_q, pages_k, pages_v = q.index_select(0, q_rows), k[start:stop], v[start:stop]
        results.append(_forward(page_q, pages_k, pages_v, 0.0, False, scale=scale))
        places[inside] = ids[inside] - start + first_place
        first_place += stop - start
    return results, places


def _attend_cut_pages(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, cut: list[_CutPage], scale: float
) -> tuple[Tensor, Tensor]:
    """Return out and lse of pages seen in part; their other keys may hold anything."""
    row, index, start, stop = torch.tensor(cut, device="cpu").unbind(1)
    page_ids = page_table[row, index].long()
    offsets = torch.arange(k.shape[2], device="cpu")
    hidden = (offsets < start[:, None]) | (offsets >= stop[:, None])
    hidden_keys = hidden[:, None, :, None]
    k, v = (pages.index_select(0, page_ids).masked_fill_(hidden_keys, 0) for pages in (k, v))
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device="cpu").masked_fill_(hidden, -math.inf)
    return _forward(q[row], k, v, 0.0, False, attn_mask=bias[:, None, None], scale=scale)


def _merge_pages(
    q: Tensor, k: Tensor, seen_pages: _SeenPages, results: list[tuple[Tensor, Tensor]],
    places: Tensor, page_count: int,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Merge the results of each row's pages by their log-sum-exp; return None where the kernel may
    have hidden a NaN."""
    slot_count = 1 + max(seen_pages.slots, default=0)
    if len(seen_pages.rows) < len(q) * slot_count:  # one more result, of no keys, fills empty slots
        no_out = q.new_zeros(1, *q.shape[1:])
        no_lse = torch.full(no_out.shape[:3], -math.inf, dtype=acc_dtype(q.dtype), device="cpu")
        results.append((no_out, no_lse))
    index = torch.full((len(q), slot_count), page_count, dtype=torch.int64, device="cpu")
    index[seen_pages.rows, seen_pages.slots] = places
    outs, lses = (
        (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, index.flatten())
        for parts in zip(*results, strict=True)
    )
    outs, lses = outs.unflatten(0, index.shape), lses.unflatten(0, index.shape)
    if _some_zero(lses) and not (_finite(q) and _finite(k)):
        return None
    lse = lses.logsumexp(1)
    weights = (lses - lse.masked_fill(lse == -math.inf, 0)[:, None]).exp_()
    return torch.einsum("bphi,bphid->bhid", weights, outs.to(lses.dtype)), lse
