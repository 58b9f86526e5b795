"""Keys that many rows share, read once: attention level by level, merged."""

from collections.abc import Sequence
from typing import NamedTuple, Never

import torch
from torch import Tensor

from ..arguments import check_dense, check_function, shown
from ..distributed import merge
from ..errors import ArgumentError
from ..keywords import unknown_keywords
from ..mods.base import Mask, MaskFn, Score, ScoreFn, value
from ..run import run
from ..types import Request
from .attend import cache_of


class Level(NamedTuple):
    """Some keys of every row, after those of the levels before.

    - `k`, `v`, `lengths`, `page_table`: a cache of groups, as `attention` takes one of rows.
    - `rows`: `(b,)` int32, the group whose keys a row reads; None where every row has its own.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None = None
    rows: Tensor | None = None


@value
class MaskOfLevel(Mask):
    """`mask` of a level's queries and keys at their positions in the whole: query `q_idx` of group
    b is token `q_idx + first[b]`, of row `row[token]`, at `at[token]`; keys begin at
    `before[row]`."""

    mask: MaskFn
    first: Tensor
    row: Tensor
    at: Tensor
    before: Tensor
    last: int  # token

    def check_sizes(self, b, h, q_len, kv_len):
        """The mask was made for the whole, whose sizes are not known here."""

    def __call__(self, b, h, q_idx, kv_idx):
        token = (q_idx + self.first[b]).clamp(max=self.last).clamp(min=0)
        row = self.row[token]
        return self.mask(row, h, self.at[token], kv_idx + self.before[row])


@value
class ScoreOfLevel(Score):
    """`score` of a level, as `MaskOfLevel`."""

    score: ScoreFn
    first: Tensor
    row: Tensor
    at: Tensor
    before: Tensor
    last: int  # token

    def check_sizes(self, b, h, q_len, kv_len):
        """The score was made for the whole, whose sizes are not known here."""

    def __call__(self, score, b, h, q_idx, kv_idx):
        token = (q_idx + self.first[b]).clamp(max=self.last).clamp(min=0)
        row = self.row[token]
        return self.score(score, row, h, self.at[token], kv_idx + self.before[row])


def cascade(
    q: Tensor,  # (b, hq, q_len, d)
    levels: Sequence[Level | tuple],
    score: ScoreFn | None = None,
    mask: MaskFn | None = None,
    *,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    backend: str = "auto",
    **unknown: Never,
) -> Tensor:
    """`attention` over keys that lie in several caches, one after the other, of which many rows may
    share some: a prompt that all begin with is read once, for the queries of all of them together.

    **Arguments:** as `attention`, and

    - `levels`: `(k, v, lengths, page_table, rows)` each, see `Level`; the last one holds the keys
      of the queries themselves. Score and mask see positions in the whole row.

    **Returns:** `(b, hq, q_len, dv)`, the dtype of q.

    (Juravsky et al. 2024, Hydragen, arXiv 2402.05099; Ye et al. 2025, FlashInfer, arXiv 2501.01005)
    """
    if unknown:
        raise unknown_keywords(cascade, unknown)
    all_levels: list[Level] = [Level(*level) for level in levels]  # type: ignore[bad-argument-type]
    check_dense(q=q)
    if not all_levels or not isinstance(q, Tensor) or q.dim() != 4:
        raise ArgumentError(
            f"cascade takes q (b, hq, q_len, d) and a level or more, got {shown(q)}"
        )
    if score is not None:
        check_function("score", score, None)
    if mask is not None:
        check_function("mask", mask, None)
    b, hq, q_len, d = q.shape
    level_lengths = [_of_rows(level, b) for level in all_levels]
    total = sum(level_lengths[1:], start=level_lengths[0])
    before, parts = torch.zeros_like(total), []
    positions = total[:, None] - q_len + torch.arange(q_len, device=q.device)
    for n, level in enumerate(all_levels):
        groups = level.lengths.shape[0]
        if level.rows is None:
            order = torch.arange(b, device=q.device)
            first_query = torch.arange(groups, device=q.device) * q_len
            packed, cu_q, max_q = q, None, None
            count = torch.full_like(first_query, q_len)
        else:  # the queries of a group follow each other
            order = level.rows.argsort(stable=True)
            edges = torch.arange(groups + 1, dtype=level.rows.dtype, device=q.device)
            cu_q = torch.searchsorted(level.rows[order], edges).to(torch.int32) * q_len
            packed = q[order].transpose(0, 1).reshape(1, hq, b * q_len, d)
            max_q = b * q_len
            first_query, count = cu_q[:-1].long(), cu_q.diff()
        level_coords = (
            first_query - level.lengths + count, order.repeat_interleave(q_len),
            positions[order].flatten(), before, b * q_len - 1,
        )  # fmt: skip
        result = run(
            Request(
                packed, level.k, level.v,
                None if score is None else ScoreOfLevel(score, *level_coords),
                None if mask is None else MaskOfLevel(mask, *level_coords),
                scale, sink if n == 0 else None,
                backend=backend, partial=True,
                keys=cache_of(packed, level.k, level.v, level.lengths, level.page_table, cu_q,
                              max_q, None, None),
            )
        )  # fmt: skip
        out, lse = result.out, result.lse
        if cu_q is not None:
            back = order.argsort()
            out = out[0].unflatten(1, (b, q_len)).transpose(0, 1)[back]
            lse = lse[0].unflatten(1, (b, q_len)).transpose(0, 1)[back]
        parts.append((out, lse))
        before = before + level_lengths[n]
    return merge(*parts)[0].to(q.dtype)


def _of_rows(level: Level, b: int) -> Tensor:
    """Return how many keys of a level every row has, int64 `(b,)`."""
    lengths = level.lengths.long()
    if level.rows is not None:
        if tuple(level.rows.shape) != (b,) or level.rows.dtype != torch.int32:
            raise ArgumentError(f"rows of a level must be int32 (b,), got {shown(level.rows)}")
        return lengths[level.rows.long()]
    if tuple(lengths.shape) != (b,):
        raise ArgumentError(
            f"a level without rows has one length for each of {b} rows, got {shown(level.lengths)}"
        )
    return lengths
