"""Few queries over pages, with no copy of them.

Every page is an entry of the batch: PyTorch's flash kernel runs over the pages as they lie, each
with the queries of the row that has it, and the results of a row's pages are merged by their
log-sum-exp. Gathering the pages would cost a copy of all that is read. Pages of which a row sees a
part only are few, and copied.
"""

import math

import torch
from torch import Tensor

from ...types import acc_dtype
from .flash import _finite, _forward, _some_zero
from .key_ranges import Ranges

_LEAST = 64  # bytes of a column of a page; products of fewer keys take longer than copies
_GAP = 1 << 16  # numbers of others' pages that are read, rather than to launch once more


def by_pages(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, ranges: list[Ranges | None], scale: float
) -> tuple[Tensor, Tensor] | None:
    """out and lse of q `(b, hk, queries, d)` over pages `(pages, hk, page, d)`, each row over one
    range of its keys or none. None where that is no gain, because pages are small, two rows share
    one, or they lie far apart; and where the kernel may hide NaN."""
    page, device = k.shape[2], "cpu"
    if page * k.element_size() < _LEAST:
        return None
    rows: list[int] = []  # of every page that is seen, those of which a part is seen at the end
    slots: list[int] = []  # its place among those of its row
    whole: list[Tensor] = []
    cut: list[tuple[int, int, int, int]] = []  # row, number in the row, first key in it, and last
    places: list[int] = []
    for row, seen in enumerate(ranges):
        if seen is None:
            continue
        first, last = -(-seen.start // page), seen.stop // page
        count = max(0, last - first)
        if count:
            whole.append(table[row, first:last])
            rows += [row] * count
            slots += range(count)
        for n in sorted({seen.start // page, (seen.stop - 1) // page}):
            if not first <= n < last:
                start, stop = seen.start - n * page, seen.stop - n * page
                cut.append((row, n, max(start, 0), min(stop, page)))
                places.append(count)
                count += 1
    ids = torch.cat(whole).long() if whole else torch.empty(0, dtype=torch.int64, device=device)
    runs = _runs(ids, page * k.shape[1] * (k.shape[3] + v.shape[3]))
    if runs is None:
        return None
    # Results of the pages of each run, in their order in memory, of the cut ones, and of no key.
    parts: list[tuple[Tensor, Tensor]] = []
    place = torch.empty_like(ids)
    row_of, done = torch.tensor(rows, dtype=torch.int64, device=device), 0
    for start, stop in runs:
        here = slice(None) if len(runs) == 1 else ((ids >= start) & (ids < stop)).nonzero()[:, 0]
        owner = torch.zeros(stop - start, dtype=torch.int64, device=device)
        owner[ids[here] - start] = row_of[here]
        own = k[start:stop], v[start:stop]
        parts.append(_forward(q.index_select(0, owner), *own, 0.0, False, scale=scale))
        place[here] = ids[here] - start + done
        done += stop - start
    if cut:
        parts.append(_of_cut_pages(q, k, v, table, cut, scale))
        place = torch.cat([place, torch.arange(done, done + len(cut), device=device)])
        rows += [row for row, *_ in cut]
        slots += places
    most = 1 + max(slots, default=0)
    if len(rows) < len(q) * most:
        none = q.new_zeros(1, *q.shape[1:])
        of_none = torch.full(none.shape[:3], -math.inf, dtype=acc_dtype(q.dtype), device=device)
        parts.append((none, of_none))
    index = torch.full((len(q), most), done + len(cut), dtype=torch.int64, device=device)
    index[rows, slots] = place
    outs, sums = (
        (x[0] if len(x) == 1 else torch.cat(x)).index_select(0, index.flatten())
        for x in zip(*parts, strict=True)
    )
    outs, sums = outs.unflatten(0, index.shape), sums.unflatten(0, index.shape)
    if _some_zero(sums) and not (_finite(q) and _finite(k)):
        return None
    lse = sums.logsumexp(1)
    weights = (sums - lse.masked_fill(lse == -math.inf, 0)[:, None]).exp_()
    return torch.einsum("bphi,bphid->bhid", weights, outs.to(sums.dtype)), lse


def _runs(ids: Tensor, width: int) -> list[tuple[int, int]] | None:
    """Stretches of memory that hold these pages and few others; None for many, or where a page is
    there twice."""
    if not len(ids):
        return []
    ordered = ids.sort().values
    steps = ordered.diff()
    if bool((steps == 0).any()):
        return None
    ends = (steps > 1 + _GAP // width).nonzero()[:, 0]
    if 8 * len(ends) > len(ids):
        return None
    starts = [int(ordered[0]), *ordered[ends + 1].tolist()]
    stops = [*(ordered[ends] + 1).tolist(), int(ordered[-1]) + 1]
    return list(zip(starts, stops, strict=True))


def _of_cut_pages(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, cut: list[tuple[int, int, int, int]],
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of pages of which a part is seen; the rest of them may hold anything."""
    row, n, start, stop = torch.tensor(cut, device="cpu").unbind(1)
    ids = table[row, n].long()
    at = torch.arange(k.shape[2], device="cpu")
    hidden = (at < start[:, None]) | (at >= stop[:, None])
    k, v = (x.index_select(0, ids).masked_fill_(hidden[:, None, :, None], 0) for x in (k, v))
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device="cpu").masked_fill_(hidden, -math.inf)
    return _forward(q[row], k, v, 0.0, False, attn_mask=bias[:, None, None], scale=scale)
