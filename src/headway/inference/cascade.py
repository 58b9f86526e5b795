"""Keys that many rows share, read once: attention level by level, merged."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Never

import torch
from torch import Tensor

from ..arguments import check_dense, check_function, check_global, shown
from ..distributed import merge
from ..errors import ArgumentError
from ..keywords import unknown_keywords
from ..mods.base import Mask, MaskFn, Score, ScoreFn, value
from ..mods.library.packed import KeptLogit
from ..run import run
from ..surroundings import dispatch_modes, host_can_read
from ..types import AttentionOutput, Forward, Request, named_under_compile
from .attend import cache_of
from .step import check_offsets


class Level(NamedTuple):
    """A stretch of keys, which follows the keys of the levels before it.

    - `k`, `v`, `lengths`, `page_table`, `k_scale`, `v_scale`: a cache as `attention` takes it, with
      one entry for each group of rows that share keys.
    - `rows`: int32 `(b,)`, the group of each row, or -1 for a row without keys here. None: every
      row has keys of its own. Another number is an error on the CPU. Elsewhere it means no keys.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    page_table: Tensor | None = None
    rows: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


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
    q: Tensor,  # (b, hq, q_len, d) or, with cu_q, (1, hq, tokens, d)
    levels: Sequence[Level | tuple],
    score: ScoreFn | None = None,
    mask: MaskFn | None = None,
    *,
    cu_q: Tensor | None = None,  # (b + 1,) int32
    max_q: int | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    backend: str = "auto",
    **unknown: Never,
) -> Tensor:
    """Return `attention` over keys in several caches, of which rows may share some.

    A prompt that many rows begin with is read once, for the queries of all these rows together.

    **Arguments:** as `attention`, and

    - `levels`: the caches, in the order of positions: a `Level` each, or a tuple of its fields. The
      last one holds the keys of the queries themselves. Score and mask see positions in the whole
      row.

    **Returns:** `(b, hq, q_len, dv)`, or `(1, hq, tokens, dv)`, in the dtype of q.

    **Raises:** as `attention`.

    (Juravsky et al. 2024, Hydragen, arXiv 2402.05099; Ye et al. 2025, FlashInfer, arXiv 2501.01005)
    """
    if unknown:
        raise unknown_keywords(cascade, unknown)
    return _cascade(q, levels, score, mask, cu_q, max_q, scale, sink, backend, False).out


def cascade_with_stats(
    q: Tensor,  # (b, hq, q_len, d) or, with cu_q, (1, hq, tokens, d)
    levels: Sequence[Level | tuple],
    score: ScoreFn | None = None,
    mask: MaskFn | None = None,
    *,
    cu_q: Tensor | None = None,  # (b + 1,) int32
    max_q: int | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,  # (hq,)
    backend: str = "auto",
    **unknown: Never,
) -> AttentionOutput:
    """Return `cascade`, the log-sum-exp of every query over all levels, `(b, hq, q_len)` or
    `(1, hq, tokens)`, and the largest logit of every row and head, `(b, hq)`: see
    `headway.AttentionOutput`. With a score, the largest logits take a second pass over the keys.

    It takes the arguments of `cascade` and raises its errors.
    """
    if unknown:
        raise unknown_keywords(cascade_with_stats, unknown)
    return _cascade(q, levels, score, mask, cu_q, max_q, scale, sink, backend, True)


class _Queries(NamedTuple):
    """The queries of a cascade, which are also counted one after the other, as tokens.

    - `cu_q`, `max_q`: as the caller gave them; None where q is not packed.
    - `ends`: `(b + 1,)`, where the tokens of every row begin, and where the last ones end.
    - `row`: `(tokens,)` int64, the row of every token; b for tokens of no row.
    """

    q: Tensor
    cu_q: Tensor | None
    max_q: int | None
    ends: Tensor
    row: Tensor

    @staticmethod
    def of(q: Tensor, cu_q: Tensor | None, max_q: int | None, rows: int) -> "_Queries":
        """Return the queries of so many rows."""
        b, _, q_len, _ = q.shape
        if cu_q is None:
            tokens, ends = b * q_len, torch.arange(b + 1, dtype=torch.int32, device=q.device)
            ends = ends * q_len
        else:
            check_offsets(cu_q, rows, q.device)
            tokens, ends = q_len, cu_q
        token = torch.arange(tokens, dtype=ends.dtype, device=q.device)
        return _Queries(q, cu_q, max_q, ends, torch.searchsorted(ends, token, right=True) - 1)

    def tokens(self, x: Tensor) -> Tensor:
        """Return values of queries, `(b, hq, q_len, ·)`, as `(1, hq, tokens, ·)`."""
        return x if self.cu_q is not None else x.transpose(0, 1).flatten(1, 2)[None]

    def from_tokens(self, x: Tensor) -> Tensor:
        """Return values of tokens, `(1, hq, tokens, ...)`, in the form of q."""
        b, _, q_len, _ = self.q.shape
        return x if self.cu_q is not None else x[0].unflatten(1, (b, q_len)).transpose(0, 1)

    def by_group(self, level: Level) -> tuple["_Queries", Tensor]:
        """Return the queries packed so that those of a group follow each other, and the order in
        which their tokens were taken."""
        groups, rows = level.lengths.shape[0], level.rows
        assert rows is not None
        rows = torch.cat((rows, rows.new_full((1,), -1)))  # of tokens of no row
        group = rows[self.row]
        group = torch.where((group >= 0) & (group < groups), group, groups)
        order = group.argsort(stable=True)
        edges = torch.arange(groups + 1, dtype=group.dtype, device=group.device)
        ends = torch.searchsorted(group[order], edges).to(torch.int32)
        packed = self.tokens(self.q)[:, :, order]
        return _Queries(packed, ends, len(order), ends, self.row[order]), order

    def largest_by_row(self, of_queries: Tensor) -> Tensor:
        """Return the largest of `(b, hq, q_len)` in every row, `(rows, hq)`."""
        of_tokens = self.tokens(of_queries[..., None])[0, :, :, 0]
        rows, hq = len(self.ends) - 1, len(of_tokens)
        largest = of_tokens.new_full((rows + 1, hq), -math.inf)
        index = self.row[:, None].expand(-1, hq)
        return largest.scatter_reduce_(0, index, of_tokens.mT, "amax")[:rows]


@named_under_compile
def _cascade(
    q: Tensor, levels: Sequence[Level | tuple], score: ScoreFn | None, mask: MaskFn | None,
    cu_q: Tensor | None, max_q: int | None, scale: float | None, sink: Tensor | None, backend: str,
    stats: bool,
) -> AttentionOutput:  # fmt: skip
    """Return the results of `cascade_with_stats`; max_logit is empty without `stats`."""
    all_levels = _listed(levels)
    check_dense(q=q)
    if not isinstance(q, Tensor) or q.dim() != 4:
        raise ArgumentError(f"q must be (b, hq, q_len, d), got {shown(q)}")
    for kind, mod in (("score", score), ("mask", mask)):
        if mod is not None:
            check_function(kind, mod, None)
    check_global(mask)
    cache_of(q, None, None, None, None, cu_q, max_q, None, None)  # cu_q and max_q go together
    first = all_levels[0]
    b = len(q) if cu_q is None else len(first.lengths if first.rows is None else first.rows)
    queries = _Queries.of(q, cu_q, max_q, b)
    level_lengths = [_of_rows(level, b) for level in all_levels]
    total = sum(level_lengths[1:], start=level_lengths[0])
    row = queries.row.clamp(max=b - 1)
    position = total[row] - queries.ends[row + 1] + torch.arange(len(row), device=q.device)
    before, parts, maxima = torch.zeros_like(total), [], []
    for n, level in enumerate(all_levels):
        of_level, order = (queries, None) if level.rows is None else queries.by_group(level)
        places = (
            of_level.ends[1:].long() - level.lengths, row if order is None else row[order],
            position if order is None else position[order], before, len(row) - 1,
        )  # fmt: skip
        keys = cache_of(
            of_level.q, *level[:4], of_level.cu_q, of_level.max_q, level.k_scale, level.v_scale
        )
        request = Request(
            of_level.q, level.k, level.v,
            None if score is None else ScoreOfLevel(score, *places),
            None if mask is None else MaskOfLevel(mask, *places),
            scale, sink if n == 0 else None,
            backend=backend, partial=True, keys=keys, row_max=stats and score is None,
        )  # fmt: skip
        results = run(request)
        if stats and score is not None:
            logits = ScoreOfLevel(KeptLogit(score), *places)
            results = results._replace(
                row_max=run(request._replace(score=logits, row_max=True)).row_max
            )
        if order is not None:
            back = order.argsort()
            results = Forward(
                *[queries.from_tokens(x[:, :, back]) if x.dim() > 2 else x for x in results]
            )
        parts.append((results.out, results.lse))
        maxima.append(results.row_max)
        before = before + level_lengths[n]
    out, lse = merge(*parts)
    largest = queries.largest_by_row(torch.stack(maxima).amax(0)) if stats else maxima[0]
    return AttentionOutput(out.to(q.dtype), lse, largest)


def _listed(levels: Any) -> list[Level]:
    """Return the levels, if every one has the tensors of its keys."""
    try:
        named = [Level(*level) for level in levels]
    except TypeError:
        named = []
    if not named:
        raise ArgumentError(
            "levels must be a list of Level, or of tuples of its fields, "
            f"({', '.join(Level._fields)}), of which the first three are needed, got "
            f"{type(levels).__name__}"
        )
    for n, level in enumerate(named):
        for name, x in level._asdict().items():
            if not isinstance(x, Tensor) and (x is not None or name not in Level._field_defaults):
                raise ArgumentError(
                    f"{name} of levels[{n}] must be a tensor, got {type(x).__name__}"
                )
    return named


def _of_rows(level: Level, b: int) -> Tensor:
    """Return how many keys of a level every row has, int64 `(b,)`."""
    lengths = level.lengths.long()
    if level.rows is not None:
        if tuple(level.rows.shape) != (b,) or level.rows.dtype != torch.int32:
            raise ArgumentError(f"rows of a level must be int32 (b,), got {shown(level.rows)}")
        rows, groups = level.rows.long(), len(lengths)
        if rows.device != lengths.device:
            raise ArgumentError(
                f"rows of a level are on {rows.device}, its lengths on {lengths.device}; keep them "
                "there: a copy waits for the device"
            )
        if rows.is_cpu and host_can_read(rows) and b and not dispatch_modes():
            low, high = (int(n) for n in rows.aminmax())
            if low < -1 or high >= groups:
                raise ArgumentError(
                    f"rows of a level are numbers of its {groups} groups, or -1 for none, got "
                    f"{low} to {high}"
                )
        lengths = torch.cat((lengths, lengths.new_zeros(1)))  # of a row without a group
        return lengths[torch.where((rows >= 0) & (rows < groups), rows, groups)]
    if tuple(lengths.shape) != (b,):
        raise ArgumentError(
            f"a level without rows has one length for each of {b} rows, got {shown(level.lengths)}"
        )
    return lengths
