"""Which rows of a call with few queries are computed together."""

from ..cache_rows import Row
from .key_ranges import Ranges

_WASTE = 1 << 16  # numbers that are read in the time of a row's launches


class Part:
    """Rows that are computed together: neighbours in q and in the cache."""

    def __init__(self, rows: list[Row], own: list[list[Ranges]]) -> None:
        self.rows, self.own = rows, own
        row, last = rows[0], rows[-1]
        self.count = row.i.stop - row.i.start  # queries of a row
        self.of = slice(row.n, last.n + 1)  # the rows in the cache
        self.at = slice(row.of, row.of + len(rows)), slice(None), row.i  # the queries in q
        same = len(rows) == 1 or all(of == own[0] for of in own)
        seen = own[:1] if same else own
        # The first key that any row sees, and the one after the last.
        self.start = min([of[0].start for of in seen if of], default=0)
        self.stop = max([of[-1].stop for of in seen if of], default=0)
        # What to visit: a row's own stretches, or one that holds those of all rows.
        self.ranges = own[0] if same else [Ranges(self.start, self.stop, False)]

    @property
    def ragged(self) -> bool:
        """Whether some rows have keys where others have none."""
        return any(row.length != self.rows[0].length for row in self.rows)


def alone(rows: list[Row], ranges: list[list[Ranges]]) -> list[Part]:
    """Each row by itself."""
    return [Part([row], [own]) for row, own in zip(rows, ranges, strict=True)]


def together(
    rows: list[Row], ranges: list[list[Ranges]], width: int, most: int | None
) -> list[Part]:
    """Neighbours that see the same keys, or so nearly that reading some for nothing costs less than
    the launches of a part.

    **Arguments:** `width`: numbers of a key of all heads, with its value; `most`: how many a part
    of several rows may read, where they are together only to save launches; None for no limit.
    """
    parts: list[Part] = []
    if rows and all(own == ranges[0] for own in ranges):
        whole = Part(rows, ranges)
        if most is None or len(rows) * (whole.stop - whole.start) * width <= most:
            return [whole]
    begin = start = stop = used = 0  # of the part that is being made: its first row, and its keys
    for n, own in enumerate(ranges):
        seen = sum(x.stop - x.start for x in own)
        first, last = (own[0].start, own[-1].stop) if own else (start, start)
        if n > begin and used:
            first, last = (min(first, start), max(last, stop)) if own else (start, stop)
        count = n + 1 - begin
        read = count * (last - first)
        fits = most is None or read * width <= most
        if n > begin and not (fits and (read - used - seen) * width <= _WASTE * count):
            parts.append(Part(rows[begin:n], ranges[begin:n]))
            begin, used = n, 0
            first, last = (own[0].start, own[-1].stop) if own else (0, 0)
        start, stop, used = first, last, used + seen
    if rows:
        parts.append(Part(rows[begin:], ranges[begin:]))
    return parts
