"""Write a block mask as a page: one HTML file that zooms from a million tokens to one tile.

The file holds runs of tiles, never pairs: on a grid of whole tiles and on coarser ones, each half
as fine along each side as the one before. `report.html` is the page around them; it loads
nothing from a network.
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
from .picture import COLOURS, DrawableMask, group_labels

if TYPE_CHECKING:
    import numpy as np

_PAGE = Path(__file__).with_name("report.html")
_MAX_BYTES = 2 << 20  # of all grids, compressed; the finest grids are dropped to fit
_MAX_RUNS = 1 << 22  # of a grid; finer grids are not tried
_COARSEST = 128  # cells along a side
MAX_GROUPS = 64  # batches and heads in a page


def save(mask: DrawableMask, path: str | PathLike, title: str | None = None) -> None:
    """Write the page to a path that ends in .html."""
    if not fspath(path).lower().endswith((".html", ".htm")):
        raise ArgumentError(f"{fspath(path)!r} must end in .html; save_picture draws PNG, SVG, PDF")
    text = page(mask, title)
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise ArgumentError(f"cannot write to {path}: {error}") from error


def page(mask: DrawableMask, title: str | None = None) -> str:
    """Return the text of the page."""
    if 0 in mask.shape:
        raise ArgumentError(f"a block mask of shape {mask.shape} has no pair to draw")
    title = title or mask.name()
    data = json.dumps(contents(mask, title), separators=(",", ":"))
    names = zip(("empty", "partial", "full"), COLOURS, strict=True)
    colours = "".join(f"--{name}:{colour};" for name, colour in names)
    return (
        _PAGE.read_text(encoding="utf-8")
        .replace("/*COLOURS*/", colours)
        .replace("<!--TITLE-->", html.escape(title))
        .replace("/*DATA*/null", data.replace("<", "\\u003c"))  # no text ends the script
    )


def contents(mask: DrawableMask, title: str) -> dict[str, Any]:
    """Return the data of the page: sizes, and for each batch and head its counts and grids."""
    labels = group_labels(*mask.shape[:2])
    grids, factor = [], 1
    while True:
        tile = mask.tile[0] * factor, mask.tile[1] * factor
        coarse_mask = mask if factor == 1 else mask.retile(tile)
        tiles = coarse_mask.tiles
        if len(tiles.rows_full.start) + len(tiles.rows_partial.start) <= _MAX_RUNS:
            parts = [coarse_mask[b, h] for _, b, h in labels[:MAX_GROUPS]]
            grids.append((factor, coarse_mask.grid, [_pack_runs(part) for part in parts]))
        if max(coarse_mask.grid) <= _COARSEST:
            break
        factor *= 2
    while len(grids) > 1 and sum(len(x) for _, _, packed in grids for x in packed) > _MAX_BYTES:
        del grids[0]
    groups = [
        {
            "label": label,
            "counts": mask[b, h].counts(),
            "grids": [base64.b64encode(packed[n]).decode() for _, _, packed in grids],
        }
        for n, (label, b, h) in enumerate(labels[:MAX_GROUPS])
    ]
    return {
        "title": title,
        "shape": mask.shape,
        "tile": mask.tile,
        "groups": groups,
        "left_out": len(labels) - len(groups),
        "grids": [
            {"by": factor, "rows": rows, "columns": columns} for factor, (rows, columns), _ in grids
        ],
    }


def _pack_runs(mask: DrawableMask) -> bytes:
    """Return the runs of one batch and head, compressed int32 numbers, row after row: how many a
    row has, then the starts, the counts, and 1 for a partial or 2 for a full one.

    Starts and counts are differences to the same run of the row before: most rows are the
    row before, shifted. Bytes of one significance are side by side, which compresses well.
    """
    import numpy as np  # imported here: a copy on the Hugging Face Hub imports only PyTorch

    row, start, count, kind = (x.cpu().numpy() for x in _all_runs(mask))
    runs_per_row = np.bincount(row, minlength=mask.grid[0])
    first_run = runs_per_row.cumsum() - runs_per_row  # of each row
    run_in_row = np.arange(len(row)) - first_run[row]
    exists = (row > 0) & (run_in_row < runs_per_row[row - 1])
    run_above = np.where(exists, first_run[row - 1] + run_in_row, len(row))
    parts = [runs_per_row, *(x - np.append(x, 0)[run_above] for x in (start, count)), kind]
    return zlib.compress(b"".join(map(_byte_planes, parts)), 9)


def _all_runs(mask: DrawableMask) -> list[torch.Tensor]:
    """Return row, start, count and kind of all runs, in their order."""
    kinds = (mask.tiles.rows_full, 2), (mask.tiles.rows_partial, 1)
    order = torch.cat([runs.keys(mask.grid[1]) for runs, _ in kinds]).argsort()
    values = [
        (runs.row(), runs.start, runs.count, torch.full_like(runs.start, kind))
        for runs, kind in kinds
    ]
    return [torch.cat(x)[order] for x in zip(*values, strict=True)]


def _byte_planes(x: "np.ndarray") -> bytes:
    """Return the bytes of int32 numbers, those of one significance side by side."""
    return x.astype("<i4").view("u1").reshape(-1, 4).T.tobytes()
