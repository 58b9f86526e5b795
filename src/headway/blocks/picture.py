"""Draw block masks and scores: as text for the terminal, as an image for a page or a paper."""

import html
import math
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike, fspath
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..mods.base import MaskFn, ScoreFn, show
from ..mods.evaluation.pointwise import Positions, mask_at, score_at
from ..mods.lowering import lower_mod
from ..types import as_int
from .tiles import Tiles

CPU = torch.device("cpu")

_CELLS = 1024  # the most cells along each side of an image ...
_VECTORS = 128  # ... and of one in which each run of cells is a shape of its own
_GRID = 160  # up to this number of cells, lines between them help the eye
PANELS = 16  # the most batches and heads in a picture
# Empty, partial, full: apart in colour, in grey print, and for colour-blind eyes.
COLOURS = ("#f4f4f2", "#f2a33a", "#1f4e79")
_TEXT = ("··", "▒▒", "██")
# Colours of a score from low to high: even steps for the eye, also in grey print.
_LEVELS = 33
_SCALE = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
_SHADES = ("  ", "░░", "▒▒", "▓▓", "██")


@dataclass(frozen=True)
class Panel:
    """A batch and head: uint8 colours `(rows, columns)`, and a cell's size in positions."""

    label: str
    cells: Tensor
    side: tuple[float, float]


@dataclass(frozen=True)
class Picture:
    """Panels side by side, and what their colours mean."""

    title: str
    panels: list[Panel]
    lengths: tuple[int, int]  # of queries and keys
    colours: tuple[str, ...]
    texts: tuple[str, ...]  # two letters for each colour
    legend: list[tuple[str, str]]  # colour, meaning
    groups: int  # batches and heads, also those that no panel shows
    key: list[tuple[str, str]]  # the legend with the letters in place of colours

    def text(self) -> str:
        """Return the picture as lines of text."""
        parts = []
        for panel in self.panels:
            lines = ["".join(self.texts[cell] for cell in line) for line in panel.cells.tolist()]
            parts.append("\n".join([panel.label, *lines] if len(self.panels) > 1 else lines))
        return "\n".join(parts)

    def save(self, path: str | PathLike) -> None:
        """Write an image; the file's ending names the format (PNG, SVG, PDF)."""
        try:
            if fspath(path).lower().endswith(".svg"):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(self.svg())
            else:
                self._with_matplotlib().savefig(path)
        except (ValueError, OSError) as error:  # an unknown ending; a full disk
            raise ArgumentError(f"cannot draw to {path}: {error}") from error

    # -- SVG ---------------------------------------------------------------------------------------

    def svg(self) -> str:
        """Return the picture as SVG, which loads nothing from a network."""
        q_len, kv_len = self.lengths
        longest = max(q_len, kv_len, 1)
        max_cells = 320 if len(self.panels) == 1 else 180
        width, height = (max(max_cells * n / longest, max_cells / 8) for n in (kv_len, q_len))
        columns = self._panel_columns()
        step_x, step_y = width + 56, height + 44
        lines = self.title.split("\n")
        top = 18 * len(lines) + 14
        legend_width = 48 + sum(32 + 6 * len(meaning) for _, meaning in self.legend)
        total_x = max(columns * step_x + 24, 8 * max(map(len, lines)) + 24, legend_width)
        total_y = top + -(-len(self.panels) // columns) * step_y + 30
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_x:.0f} {total_y:.0f}" '
            f'width="{total_x:.0f}" height="{total_y:.0f}" font-family="sans-serif" '
            'font-size="11" fill="#333333">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        for n, line in enumerate(lines):
            parts.append(
                f'<text x="16" y="{20 + 18 * n}" font-size="13">{html.escape(line)}</text>'
            )
        for n, panel in enumerate(self.panels):
            x, y = 48 + n % columns * step_x, top + n // columns * step_y + 16
            parts += self._panel(panel, x, y, width, height)
        x = 48.0
        for colour, meaning in self.legend:
            y = total_y - 14
            parts.append(
                f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}" '
                f'stroke="#888888" stroke-width="0.5"/><text x="{x + 15:.0f}" y="{y:.0f}">'
                f"{html.escape(meaning)}</text>"
            )
            x += 32 + 6 * len(meaning)
        return "\n".join([*parts, "</svg>\n"])

    def _panel(self, panel: Panel, x: float, y: float, width: float, height: float) -> list[str]:
        q_len, kv_len = self.lengths
        parts = [
            f'<text x="{x:.1f}" y="{y - 5:.1f}">{html.escape(panel.label)}</text>'
            f'<text x="{x - 6:.1f}" y="{y + 9:.1f}" text-anchor="end">0</text>'
            f'<text x="{x - 6:.1f}" y="{y + height:.1f}" text-anchor="end">{q_len}</text>'
            f'<text x="{x:.1f}" y="{y + height + 14:.1f}">0</text>'
            f'<text x="{x + width:.1f}" y="{y + height + 14:.1f}" text-anchor="end">{kv_len}</text>'
            f'<text x="{x + width / 2:.1f}" y="{y + height + 14:.1f}" text-anchor="middle">'
            "keys</text>"
            f'<text transform="translate({x - 8:.1f} {y + height / 2:.1f}) rotate(-90)" '
            'text-anchor="middle">queries</text>',
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{self.colours[0]}" stroke="#888888" stroke-width="0.5"/>',
            f'<g transform="translate({x:.1f} {y:.1f}) scale({width / max(kv_len, 1):.6g} '
            f'{height / max(q_len, 1):.6g})" shape-rendering="crispEdges">',
        ]
        paths: dict[int, list[str]] = {}
        for row in range(panel.cells.shape[0]):
            top, bottom = row * panel.side[0], min((row + 1) * panel.side[0], q_len)
            for colour, start, stop in _colour_stretches(panel.cells[row].tolist()):
                if colour:
                    left, right = (min(cell * panel.side[1], kv_len) for cell in (start, stop))
                    across, down = right - left, bottom - top
                    shape = f"M{left:g} {top:g}h{across:g}v{down:g}h{-across:g}z"
                    paths.setdefault(colour, []).append(shape)
        for colour, shapes in sorted(paths.items()):
            parts.append(f'<path fill="{self.colours[colour]}" d="{"".join(shapes)}"/>')
        return [*parts, "</g>"]

    def _panel_columns(self) -> int:
        return math.ceil(math.sqrt(len(self.panels)))

    # -- other images ------------------------------------------------------------------------------

    def _with_matplotlib(self) -> Any:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.colors import ListedColormap
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError(
                "drawing needs matplotlib: pip install matplotlib; an .svg file does not"
            ) from error

        single_panel, across = len(self.panels) == 1, self._panel_columns()
        size = (6.4, 6.8) if single_panel else (2.6 * across + 0.6, 2.6 * self._panel_rows() + 1.2)
        figure = Figure(figsize=size, dpi=200, layout="constrained")
        FigureCanvasAgg(figure)  # its own canvas: no window, no global state
        q_len, kv_len = self.lengths
        even = max(q_len, kv_len) < 8 * min(q_len, kv_len)
        for n, panel in enumerate(self.panels):
            axes = figure.add_subplot(self._panel_rows(), across, n + 1)
            (rows, columns), side = panel.cells.shape, panel.side
            axes.imshow(
                panel.cells.numpy(), cmap=ListedColormap(self.colours), vmin=0,
                vmax=len(self.colours) - 1, interpolation="nearest",
                extent=(0, columns * side[1], rows * side[0], 0),
                aspect="equal" if even else "auto",
            )  # fmt: skip
            axes.set(xlim=(0, kv_len), ylim=(q_len, 0))
            if single_panel:
                axes.set(xlabel="key position", ylabel="query position")
            else:
                axes.set_title(panel.label, fontsize=8)
            if single_panel and max(rows, columns) <= _GRID and len(self.colours) == len(COLOURS):
                style = {"color": "white", "linewidth": min(0.5, 40 / max(rows, columns))}
                axes.hlines([n * side[0] for n in range(rows)], 0, columns * side[1], **style)
                axes.vlines([n * side[1] for n in range(columns)], 0, rows * side[0], **style)
            axes.tick_params(labelsize=8 if single_panel else 6)
        figure.legend(
            handles=[Patch(facecolor=colour, edgecolor="#888888", linewidth=0.5, label=meaning)
                     for colour, meaning in self.legend],
            loc="outside lower center", ncols=len(self.legend), frameon=False, fontsize=9,
        )  # fmt: skip
        figure.suptitle(self.title, fontsize=10, wrap=True)
        return figure

    def _panel_rows(self) -> int:
        return -(-len(self.panels) // self._panel_columns())


def _colour_stretches(cells: list[int]) -> list[tuple[int, int, int]]:
    """Return the stretches of one colour: colour, first cell, end."""
    edges = [0, *(n for n in range(1, len(cells)) if cells[n] != cells[n - 1]), len(cells)]
    return [(cells[start], start, end) for start, end in pairwise(edges) if start < end]


# -- block masks ----------------------------------------------------------------------------------


class DrawableMask(Protocol):
    """The part of a `BlockMask` that is drawn; this file cannot import that class."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def tile(self) -> tuple[int, int]: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def tiles(self) -> Tiles: ...

    def __getitem__(self, index: tuple[int, int], /) -> "DrawableMask": ...

    def retile(self, tile: tuple[int, int]) -> "DrawableMask": ...

    def to_dense(self) -> Tensor: ...

    def counts(self) -> tuple[int, int, int]: ...

    def name(self) -> str: ...


def cells(mask: DrawableMask, max_cells: int, b: int = 0, h: int = 0) -> tuple[Tensor, int]:
    """Return a batch and head as uint8 `(rows, columns)`, at most `max_cells` a side, and how many
    tiles a cell is wide: 0 empty, 1 partial, 2 full (if all its tiles are)."""
    if 0 in mask.shape[:2]:
        raise ArgumentError(f"a block mask of shape {mask.shape} has no batch or no head to draw")
    tiles_per_cell = max(1, -(-max(mask.grid) // max_cells))
    tile = mask.tile[0] * tiles_per_cell, mask.tile[1] * tiles_per_cell
    return mask[b, h].retile(tile).to_dense()[0, 0].cpu(), tiles_per_cell


def of_block_mask(
    mask: DrawableMask, max_cells: int, panels: int = PANELS, title: str | None = None
) -> Picture:
    """Return a picture of the tiles of the first batches and heads."""
    groups = group_labels(*mask.shape[:2])
    drawn_cells = [(label, *cells(mask, max_cells, b, h)) for label, b, h in groups[:panels]]
    step = drawn_cells[0][2] if drawn_cells else cells(mask, max_cells)[1]
    side = mask.tile[0] * step, mask.tile[1] * step
    panel_list = [Panel(label, state, side) for label, state, _ in drawn_cells]
    full, partial, empty = mask.counts() if len(groups) > 1 else mask[0, 0].counts()
    total = max(full + partial + empty, 1)
    names = zip(COLOURS, ("empty", "partial", "full"), (empty, partial, full), strict=True)
    legend = [(colour, f"{name}: {n:,} ({n / total:.1%})") for colour, name, n in names]
    subtitle = f"tiles of {mask.tile[0]} × {mask.tile[1]}"
    if step > 1:
        subtitle += f", {step} × {step} of them in a cell"
    if len(groups) > len(panel_list):
        subtitle += f"; {len(panel_list)} of {len(groups)} batches and heads"
    title = title or f"{mask.name()}\n{subtitle}"
    key = [(text, meaning) for text, (_, meaning) in zip(_TEXT, legend, strict=True)]
    return Picture(title, panel_list, mask.shape[2:], COLOURS, _TEXT, legend, len(groups), key)


def text(mask: DrawableMask, rows: int) -> str:
    """Return the first batch and head as lines of text, at most `rows` of them."""
    max_cells = as_int(rows)
    if max_cells is None or max_cells < 1:
        raise ArgumentError(f"rows={rows!r} must be a positive integer")
    return of_block_mask(mask, max_cells, 1).text()


def draw(mask: DrawableMask, path: str | PathLike, title: str | None = None) -> None:
    """Write the picture as an image; the file's ending names the format (PNG, SVG, PDF)."""
    max_cells = _VECTORS if fspath(path).lower().endswith(".svg") else _CELLS
    of_block_mask(mask, max_cells, title=title).save(path)


def inline(mask: DrawableMask) -> str:
    """Return the picture as SVG, for a notebook."""
    return of_block_mask(mask, 64).svg()


def group_labels(b: int, h: int) -> list[tuple[str, int, int]]:
    """Return a label for every batch and head that the mask distinguishes."""
    words = lambda n, m: [f"batch {n}"] * (b > 1) + [f"head {m}"] * (h > 1)
    return [(", ".join(words(n, m)), n, m) for n in range(b) for m in range(h)]


# -- scores ---------------------------------------------------------------------------------------


def of_score(
    score: ScoreFn, mask: MaskFn | None, sizes: tuple[int, int, int, int], max_cells: int,
    panels: int = PANELS,
) -> Picture:  # fmt: skip
    """Return a picture of a score of logits of 0, where a mask keeps the pair: of the middle of at
    most `max_cells` cells along each side. A score of -inf counts as masked."""
    b, h, q_len, kv_len = sizes
    if not all(sizes):
        raise ArgumentError(f"(b, h, q_len, kv_len) = {sizes} has no pair to draw")
    graph, captured = lower_mod("score", score, torch.float32)
    lowered_mask = None if mask is None else lower_mod("mask", mask, torch.float32)
    graphs = [graph] if lowered_mask is None else [graph, lowered_mask[0]]
    b, h = (n if any(g.uses(x) for g in graphs) else 1 for n, x in ((b, "b"), (h, "h")))
    longest = max(q_len, kv_len)
    rows, columns = (min(n, max(1, max_cells * n // longest)) for n in (q_len, kv_len))
    q_idx, kv_idx = (
        ((torch.arange(n, device=CPU) + 0.5) * (length / n)).long()
        for n, length in ((rows, q_len), (columns, kv_len))
    )
    values = []
    groups = group_labels(b, h)
    for _, n, m in groups[:panels]:
        row, head = torch.tensor(n, device=CPU), torch.tensor(m, device=CPU)
        positions = Positions(row, head, q_idx[:, None], kv_idx)
        zero = torch.zeros(rows, columns, dtype=torch.float32, device=CPU)
        keep_mask = torch.ones(rows, columns, dtype=torch.bool, device=CPU)
        if lowered_mask is not None:
            keep_mask = mask_at(*lowered_mask, positions).expand(rows, columns)
        (t,), _ = score_at(graph, captured, positions, zero, keep_mask)
        t = torch.as_tensor(t, dtype=torch.float32, device=CPU).detach().expand(rows, columns)
        values.append(t.masked_fill(~keep_mask, -torch.inf))
    t = torch.stack(values)
    finite = t[t.isfinite()]
    low, high = (float(x) for x in finite.aminmax()) if len(finite) else (0.0, 0.0)
    level = ((t - low) * ((_LEVELS - 1) / max(high - low, 1e-30))).round().clamp(0, _LEVELS - 1)
    colour_index = torch.where(t.isfinite(), level + 1, 0).to(torch.uint8)
    side = q_len / rows, kv_len / columns
    panel_list = [Panel(g[0], x, side) for g, x in zip(groups, colour_index, strict=False)]
    colours = (COLOURS[0], *(_between(n / (_LEVELS - 1)) for n in range(_LEVELS)))
    texts = ("··", *(_SHADES[min(n * 5 // _LEVELS, 4)] for n in range(_LEVELS)))
    steps = range(5 if high > low else 1)
    named = [f"{low + (high - low) * n / 4:.3g}" for n in steps]
    legend = [(_between(n / 4), name) for n, name in zip(steps, named, strict=True)]
    key = [(_SHADES[n], name) for n, name in zip(steps, named, strict=True)]
    if bool((colour_index == 0).any()):
        other_values = bool(((colour_index == 0) & (t != -torch.inf)).any())
        meaning = "not finite" if other_values else "not kept"
        legend.insert(0, (COLOURS[0], meaning))
        key.insert(0, (texts[0], meaning))
    title = f"{show(score)}{'' if mask is None else f', where {show(mask)}'}\nof logits of 0"
    if len(groups) > len(panel_list):
        title += f"; {len(panel_list)} of {len(groups)} batches and heads"
    return Picture(title, panel_list, (q_len, kv_len), colours, texts, legend, len(groups), key)


def _between(share: float) -> str:
    """Return the colour at a share from 0 to 1 of the scale."""
    place = share * (len(_SCALE) - 1)
    segment = min(int(place), len(_SCALE) - 2)
    ends = [[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in _SCALE[segment : segment + 2]]
    mixed = [round(a + (b - a) * (place - segment)) for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{x:02x}" for x in mixed)
