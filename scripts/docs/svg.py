"""Small SVG pictures as text: grids of pairs, heat maps, bars.

Written by hand and not by a plotting library, so that the same numbers give the same bytes on every
machine (a test compares them), a picture has a few kilobytes, and one picture reads well on a light
and on a dark page: no background, middle greys, and opacity where another colour would be.
"""

from collections.abc import Iterable, Sequence
from html import escape

GREY = "#828a94"
BLUE = "#3d87d9"
ORANGE = "#e8883a"
GREEN = "#3da07a"
PURPLE = "#9a6dd0"


def svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """The whole file. `title` is what a screen reader says."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
        f'width="{_n(width)}" height="{_n(height)}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{GREY}">\n'
        f"<title>{escape(title)}</title>\n{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{more and " " + more}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" {more}/>'


def shape(x: float, y: float, cell: float, rows: Sequence[Sequence[int]], of: int) -> str:
    """The path of all cells that hold `of`, in rectangles as large as they come."""
    open_: dict[tuple[int, int], int] = {}  # runs of cells that went on in the row above: first row
    path: list[str] = []

    def close(run: tuple[int, int], first: int, row: int) -> None:
        (start, end), height = run, row - first
        path.append(
            f"M{_n(x + start * cell)} {_n(y + first * cell)}h{_n((end - start) * cell)}"
            f"v{_n(height * cell)}h{_n((start - end) * cell)}z"
        )

    for row, line in enumerate([*rows, []]):
        runs, start = set(), None
        for column, state in enumerate([*line, None]):
            if state == of and start is None:
                start = column
            elif state != of and start is not None:
                runs.add((start, column))
                start = None
        for run in sorted(open_.keys() - runs):
            close(run, open_.pop(run), row)
        for run in runs - open_.keys():
            open_[run] = row
    return "".join(path)


def axes(x: float, y: float, width: float, height: float) -> list[str]:
    """The words at the sides of a square of pairs, whose upper left corner is (x, y)."""
    turned = f'transform="rotate(-90 {_n(x - 5)} {_n(y + height / 2)})"'
    return [
        text(x + width / 2, y - 5, "key j →", "middle"),
        text(x - 5, y + height / 2, "← query i", "middle", turned),
    ]


def pairs(kept: Sequence[Sequence[int]], title: str, side: float = 224) -> str:
    """A mask, pair by pair: kept pairs are blue."""
    cell = round(side / max(len(kept), len(kept[0])), 2)
    width, height = cell * len(kept[0]), cell * len(kept)
    frame = f'fill="{GREY}" fill-opacity="0.16"'
    return svg(
        width + 18, height + 18,
        [box(17, 17, width, height, frame), *axes(17, 17, width, height),
         f'<path fill="{BLUE}" d="{shape(17, 17, cell, kept, 1)}"/>'],
        title,
    )  # fmt: skip


def heat(
    values: Sequence[Sequence[float]], title: str, side: float = 224, most: float | None = None
) -> str:
    """Numbers per pair: blue above 0, orange below, the stronger the larger."""
    cell = round(side / max(len(values), len(values[0])), 2)
    width, height = cell * len(values[0]), cell * len(values)
    parts = [*axes(17, 17, width, height), *heat_parts(17, 17, cell, values, most)]
    top = most or largest(values)
    y = height + 33
    for n, level in enumerate((-8, -4, 0, 4, 8)):
        x = 17 + n * width / 5
        parts.append(box(x, y - 9, 10, 10, _level(level)))
        parts.append(text(x + 13, y, _short(top * level / 8)))
    return svg(width + 18, height + 38, parts, title)


def largest(values: Sequence[Sequence[float]]) -> float:
    return max(abs(v) for row in values for v in row if abs(v) != float("inf")) or 1.0


def heat_parts(
    x: float, y: float, cell: float, values: Sequence[Sequence[float]], most: float | None = None
) -> list[str]:
    """The cells of a heat map. -inf leaves its cell empty."""
    top = most or largest(values)
    levels = [[None if abs(v) == float("inf") else round(8 * v / top) for v in row]
              for row in values]  # fmt: skip
    there = sorted({level for row in levels for level in row if level is not None})
    return [
        f'<path {_level(level)} d="{shape(x, y, cell, levels, level)}"/>'  # type: ignore[arg-type]
        for level in there
    ]


def _level(level: int) -> str:
    if level == 0:
        return f'fill="{GREY}" fill-opacity="0.16"'
    return f'fill="{BLUE if level > 0 else ORANGE}" fill-opacity="{_n(0.12 + 0.11 * abs(level))}"'


def curve(points: Sequence[tuple[float, float]], title: str, side: float = 224) -> str:
    """y over x, with the line y = x for comparison."""
    most = max(abs(x) for x, _ in points)

    def at(x: float, y: float) -> str:
        return f"{_n(17 + (x / most + 1) * side / 2)} {_n(17 + (1 - y / most) * side / 2)}"

    line = " ".join(at(x, y) for x, y in points)
    middle = 17 + side / 2
    return svg(
        side + 34, side + 34,
        [box(17, 17, side, side, f'fill="{GREY}" fill-opacity="0.1"'),
         f'<path d="M17 {_n(middle)}h{_n(side)}M{_n(middle)} 17v{_n(side)}" stroke="{GREY}" '
         f'stroke-opacity="0.5"/>',
         f'<polyline points="{at(-most, -most)} {at(most, most)}" fill="none" stroke="{GREY}" '
         f'stroke-dasharray="3 4"/>',
         f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="2.5"/>',
         text(side + 13, middle - 5, f"{_short(most)}", "end"),
         text(middle + 5, 29, f"{_short(most)}"),
         text(side + 13, middle + 14, "logit", "end"), text(middle - 5, 29, "score", "end")],
        title,
    )  # fmt: skip


def bars(
    groups: Sequence[tuple[str, Sequence[tuple[str, float, str]]]],
    colours: dict[str, str],
    title: str,
    unit: str,
) -> str:
    """Groups of horizontal bars: (what was timed, [(who, number, its words), ...]) each."""
    left, width, thick, gap = 132, 206, 12, 12
    most = max(number for _, group in groups for _, number, _ in group)
    parts, x, y = [], 0.0, 12.0
    for name, colour in colours.items():
        parts.append(box(x, y - 9, 10, 10, f'fill="{colour}"'))
        parts.append(text(x + 14, y, name))
        x += 30 + 5.7 * len(name)
    y += 18
    for name, group in groups:
        parts.append(text(left - 8, y + thick * len(group) / 2 + 4, name, "end"))
        for who, number, words in group:
            long = width * number / most
            parts.append(box(left, y, long, thick - 1.5, f'fill="{colours[who]}"'))
            parts.append(text(left + long + 4, y + thick - 3, words, more='font-size="10"'))
            y += thick
        y += gap
    parts.append(text(0, y + 2, unit))
    return svg(left + width + 36, y + 10, parts, title)


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".") if number != int(number) else str(int(number))


def _short(number: float) -> str:
    return f"{number:.2g}".replace("-", "−")
