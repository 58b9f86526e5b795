"""The pictures of docs/recipes/positions.md, made of what `nn.Rotary` does."""

import torch

from headway import nn
from svg import BLUE, GREY, ORANGE, PURPLE, box, heat_parts, svg, text

SIDE = 15  # of an image, in patches
KINDS = [("text", 4), ("image", (2, 3)), ("text", 3)]


def pictures() -> dict[str, str]:
    return {"pictures/rotary-axes.svg": axes(), "pictures/rotary-sections.svg": sections()}


def axes() -> str:
    """The logits of a query in the middle and of all keys, whose channels before the turn are 1."""
    cell, middle = 13, SIDE * SIDE // 2
    side, top = SIDE * cell, 20
    points = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).T
    number = torch.arange(SIDE * SIDE)
    parts = []
    for n, (rotary, positions, name) in enumerate(
        [
            (nn.Rotary(32, base=100.0), number, "by number, in reading order"),
            (nn.Rotary(32, base=100.0, axes=2), points, "by row and column: axes=2"),
        ]
    ):
        turned = rotary.rotate(torch.ones(1, 1, SIDE * SIDE, 32), rotary.angles(positions))[0, 0]
        logits = (turned @ turned[middle] / 32).view(SIDE, SIDE)
        x = 2 + n * (side + 36)
        parts += [text(x, 12, name), *heat_parts(x, top, cell, logits.tolist(), 1.0)]
        at = SIDE // 2 * cell
        parts.append(
            box(x + at, top + at, cell, cell, f'fill="none" stroke="{PURPLE}" stroke-width="3"')
        )
    y = top + side + 20
    parts += [
        box(3, y - 9, 10, 10, f'fill="none" stroke="{PURPLE}" stroke-width="3"'),
        text(18, y, "the query"),
        box(92, y - 9, 10, 10, f'fill="{BLUE}"'),
        text(106, y, "its key has a logit of 1"),
        box(246, y - 9, 10, 10, f'fill="{ORANGE}"'),
        text(260, y, "of −1"),
    ]
    title = "Logits of one query with every patch of an image, by one position and by two"
    return svg(2 * side + 40, y + 6, parts, title)


def sections() -> str:
    """The three coordinates of every token, as numbers."""
    columns, start = [], 0
    for kind, size in KINDS:
        if isinstance(size, int):
            found = [(n, n, n) for n in range(size)]
        else:
            found = [(0, r, c) for r in range(size[0]) for c in range(size[1])]
        columns += [(kind, [start + n for n in each]) for each in found]
        start = max(max(each) for _, each in columns) + 1
    cell, left = 30, 54
    parts = []
    for row, name in enumerate(("time", "row", "column")):
        y = 22 + row * cell
        parts.append(text(left - 8, y + 19, name, "end"))
        for n, (kind, each) in enumerate(columns):
            look = f'fill="{BLUE if kind == "image" else GREY}" fill-opacity="0.22"'
            parts.append(box(left + n * cell + 1, y + 1, cell - 2, cell - 2, look))
            parts.append(text(left + n * cell + cell / 2, y + 19, str(each[row]), "middle"))
    at = left
    for kind, size in KINDS:
        wide = cell * (size if isinstance(size, int) else size[0] * size[1])
        parts.append(text(at + wide / 2, 14, kind, "middle"))
        at += wide
    title = "Time, row and column of text, an image of 2 by 3 patches, and text after it"
    return svg(at + 2, 22 + 3 * cell + 2, parts, title)
