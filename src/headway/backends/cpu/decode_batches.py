"""Batches of rows: which rows of a call with few queries are computed together.

A small row costs its launches, not its products. Rows that see nearly the same keys therefore share
theirs (the figures of decoding: `decode`).
"""

from ..cache_rows import CacheRow
from .key_ranges import KeyRange

_UNSEEN_NUMBERS = 1 << 16  # numbers that are read in the time of a row's launches


class RowBatch:
    """Rows that are computed together: neighbours in q and in the cache."""

    def __init__(self, rows: list[CacheRow], row_ranges: list[list[KeyRange]]) -> None:
        self.rows, self.row_ranges = rows, row_ranges
        first_row, last_row = rows[0], rows[-1]
        self.q_len = first_row.queries.stop - first_row.queries.start
        self.cache_rows = slice(first_row.index, last_row.index + 1)
        # The queries in q.
        q_rows = slice(first_row.q_row, first_row.q_row + len(rows))
        self.q_index = q_rows, slice(None), first_row.queries
        same = len(rows) == 1 or all(ranges == row_ranges[0] for ranges in row_ranges)
        distinct = row_ranges[:1] if same else row_ranges
        # The first key that any row sees, and the one after the last.
        self.start = min([ranges[0].start for ranges in distinct if ranges], default=0)
        self.stop = max([ranges[-1].stop for ranges in distinct if ranges], default=0)
        # The ranges to visit: a row's own, or one that spans those of all rows.
        self.ranges = row_ranges[0] if same else [KeyRange(self.start, self.stop, False)]

    @property
    def ragged(self) -> bool:
        """Return whether rows have different numbers of keys."""
        return any(row.length != self.rows[0].length for row in self.rows)


def one_batch_per_row(rows: list[CacheRow], row_ranges: list[list[KeyRange]]) -> list[RowBatch]:
    """Return a batch for each row."""
    return [RowBatch([row], [ranges]) for row, ranges in zip(rows, row_ranges, strict=True)]


def batch_rows(
    rows: list[CacheRow], row_ranges: list[list[KeyRange]], key_width: int, max_numbers: int | None
) -> list[RowBatch]:
    """Batch neighbours that see the same keys, or nearly the same: reading a few keys that a row
    does not see costs less than the launches of another batch.

    **Arguments:** `key_width`: numbers of one key and its value over all heads; `max_numbers`: how
    many numbers a batch of several rows may read, None for no limit.
    """
    batches: list[RowBatch] = []
    if rows and all(ranges == row_ranges[0] for ranges in row_ranges):
        all_rows = RowBatch(rows, row_ranges)
        span = all_rows.stop - all_rows.start
        if max_numbers is None or len(rows) * span * key_width <= max_numbers:
            return [all_rows]
    # Of the batch that grows: its first row, the span of its keys, and how many of them are seen.
    first_row = start = stop = seen_keys = 0
    for n, ranges in enumerate(row_ranges):
        row_keys = sum(key_range.stop - key_range.start for key_range in ranges)
        row_start, row_stop = (ranges[0].start, ranges[-1].stop) if ranges else (start, start)
        span_start, span_stop = row_start, row_stop
        if n > first_row and seen_keys:
            span_start, span_stop = start, stop
            if ranges:
                span_start, span_stop = min(row_start, start), max(row_stop, stop)
        row_count = n + 1 - first_row
        keys_read = row_count * (span_stop - span_start)
        fits = max_numbers is None or keys_read * key_width <= max_numbers
        unseen_numbers = (keys_read - seen_keys - row_keys) * key_width
        if n > first_row and not (fits and unseen_numbers <= _UNSEEN_NUMBERS * row_count):
            batches.append(RowBatch(rows[first_row:n], row_ranges[first_row:n]))
            first_row, seen_keys = n, 0
            span_start, span_stop = (ranges[0].start, ranges[-1].stop) if ranges else (0, 0)
        start, stop, seen_keys = span_start, span_stop, seen_keys + row_keys
    if rows:
        batches.append(RowBatch(rows[first_row:], row_ranges[first_row:]))
    return batches
