"""A block mask as a page: one HTML file that zooms, from all of a million tokens to one tile.

The file holds runs of tiles, never pairs: on a grid of whole tiles and on coarser ones, each half
as fine along each side as the one before. `report.html` is the page around them; it asks nothing of
any network.
"""

import base64
import html
import json
import zlib
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError
from .picture import COLOURS, Tiled, group_labels
from .runs import Runs

if TYPE_CHECKING:
    import numpy as np

_PAGE = Path(__file__).with_name("report.html")
_BYTES = 2 << 20  # of all grids, compressed; where the tiles need more, the finest is coarser
_RUNS = 1 << 22  # a grid of more is not tried
_COARSEST = 128  # cells along a side
GROUPS = 64  # the most batches and heads in a page


def save(mask: Tiled, path: str | PathLike, title: str | None = None) -> None:
    """Write the page, which is called .html."""
    if not fspath(path).lower().endswith((".html", ".htm")):
        raise ArgumentError(f"{fspath(path)!r} must end in .html; save_picture draws PNG, SVG, PDF")
    text = page(mask, title)
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise ArgumentError(f"cannot write to {path}: {error}") from error


def page(mask: Tiled, title: str | None = None) -> str:
    """The text of the page."""
    if 0 in mask.shape:
        raise ArgumentError(f"a block mask of shape {mask.shape} has no pair to draw")
    title = title or mask.name()
    data = json.dumps(contents(mask, title), separators=(",", ":"))
    colours = "".join(
        f"--{name}:{colour};"
        for name, colour in zip(("empty", "partial", "full"), COLOURS, strict=True)
    )
    return (
        _PAGE.read_text(encoding="utf-8")
        .replace("/*COLOURS*/", colours)
        .replace("<!--TITLE-->", html.escape(title))
        .replace("/*DATA*/null", data.replace("<", "\\u003c"))  # no text in it ends the script
    )


def contents(mask: Tiled, title: str) -> dict[str, Any]:
    """What the page is told: sizes, and for each batch and head its counts and grids."""
    labels = group_labels(*mask.shape[:2])
    grids, by = [], 1
    while True:
        coarse = mask if by == 1 else mask.retile((mask.tile[0] * by, mask.tile[1] * by))
        if len(coarse.tiles.rows_full.start) + len(coarse.tiles.rows_partial.start) <= _RUNS:
            parts = [coarse[b, h] for _, b, h in labels[:GROUPS]]
            grids.append((by, coarse.grid, [_packed(part) for part in parts]))
        if max(coarse.grid) <= _COARSEST:
            break
        by *= 2
    while len(grids) > 1 and sum(len(x) for _, _, packed in grids for x in packed) > _BYTES:
        del grids[0]
    groups = [
        {
            "label": label,
            "counts": mask[b, h].counts(),
            "grids": [base64.b64encode(packed[n]).decode() for _, _, packed in grids],
        }
        for n, (label, b, h) in enumerate(labels[:GROUPS])
    ]
    return {
        "title": title,
        "shape": mask.shape,
        "tile": mask.tile,
        "groups": groups,
        "left_out": len(labels) - len(groups),
        "grids": [{"by": by, "rows": rows, "columns": columns} for by, (rows, columns), _ in grids],
    }


def _packed(mask: Tiled) -> bytes:
    """The runs of one batch and head, row after row: how many a row has, then the starts, the
    counts, and 1 for a partial or 2 for a full one, all int32 but compressed.

    Starts and counts are told as differences to the same run of the row before: most rows are the
    row before, shifted. Bytes of one significance are side by side, which compresses well.
    """
    import numpy as np  # where it is needed: a copy on the Hugging Face Hub imports only PyTorch

    row, start, count, kind = (x.cpu().numpy() for x in _joined(mask))
    runs = np.bincount(row, minlength=mask.grid[0])
    first = runs.cumsum() - runs  # of each row
    within = np.arange(len(row)) - first[row]
    above = np.where((row > 0) & (within < runs[row - 1]), first[row - 1] + within, len(row))
    parts = [runs, *(x - np.append(x, 0)[above] for x in (start, count)), kind]
    return zlib.compress(b"".join(map(_planes, parts)), 9)


def _joined(mask: Tiled) -> list[torch.Tensor]:
    """Row, start, count and kind of all runs, in their order."""
    both: list[tuple[Runs, int]] = [(mask.tiles.rows_full, 2), (mask.tiles.rows_partial, 1)]
    keys = torch.cat([runs.keys(mask.grid[1]) for runs, _ in both])
    order = keys.argsort()
    row = torch.cat([runs.row() for runs, _ in both])
    start = torch.cat([runs.start for runs, _ in both])
    count = torch.cat([runs.count for runs, _ in both])
    kind = torch.cat([torch.full_like(runs.start, n) for runs, n in both])
    return [x[order] for x in (row, start, count, kind)]


def _planes(x: "np.ndarray") -> bytes:
    return x.astype("<i4").view("u1").reshape(-1, 4).T.tobytes()
