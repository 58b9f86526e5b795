"""Pictures of block masks and of scores: text for the terminal, an image for a page or a paper."""

import html
import math
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike, fspath
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..mods.base import MaskFn, Mod, ScoreFn
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
# Of a score from low to high: even steps for the eye, also in grey print. Before them, not kept.
_LEVELS = 33
_SCALE = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
_SHADES = ("  ", "░░", "▒▒", "▓▓", "██")


@dataclass(frozen=True)
class Panel:
    """One batch and head: uint8 cells `(rows, columns)`, numbers of colours; `side` is the
    size of a cell, in positions along queries and keys."""

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
        """As lines of text."""
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
        except (ValueError, OSError) as error:  # an ending that is not known; a full disk
            raise ArgumentError(f"cannot draw to {path}: {error}") from error

    # -- SVG ---------------------------------------------------------------------------------------

    def svg(self) -> str:
        """As the text of an SVG image, which asks nothing of any network."""
        q_len, kv_len = self.lengths
        longest = max(q_len, kv_len, 1)
        most = 320 if len(self.panels) == 1 else 180
        width, height = (max(most * n / longest, most / 8) for n in (kv_len, q_len))
        across = self._across()
        step_x, step_y = width + 56, height + 44
        lines = self.title.split("\n")
        top = 18 * len(lines) + 14
        of_legend = 48 + sum(32 + 6 * len(meaning) for _, meaning in self.legend)
        total_x = max(across * step_x + 24, 8 * max(map(len, lines)) + 24, of_legend)
        total_y = top + -(-len(self.panels) // across) * step_y + 30
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_x:.0f} {total_y:.0f}" '
            f'width="{total_x:.0f}" height="{total_y:.0f}" font-family="sans-serif" '
            'font-size="11" fill="#333333">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        for n, line in enumerate(lines):
            out.append(f'<text x="16" y="{20 + 18 * n}" font-size="13">{html.escape(line)}</text>')
        for n, panel in enumerate(self.panels):
            x, y = 48 + n % across * step_x, top + n // across * step_y + 16
            out += self._panel(panel, x, y, width, height)
        x = 48.0
        for colour, meaning in self.legend:
            y = total_y - 14
            out.append(
                f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}" '
                f'stroke="#888888" stroke-width="0.5"/><text x="{x + 15:.0f}" y="{y:.0f}">'
                f"{html.escape(meaning)}</text>"
            )
            x += 32 + 6 * len(meaning)
        return "\n".join([*out, "</svg>\n"])

    def _panel(self, panel: Panel, x: float, y: float, width: float, height: float) -> list[str]:
        q_len, kv_len = self.lengths
        out = [
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
        for row, (first, last) in enumerate(_spans(panel.cells.shape[0], panel.side[0], q_len)):
            for colour, start, stop in _runs(panel.cells[row].tolist()):
                if colour:
                    left, right = (min(at * panel.side[1], kv_len) for at in (start, stop))
                    n = right - left
                    shape = f"M{left:g} {first:g}h{n:g}v{last - first:g}h{-n:g}z"
                    paths.setdefault(colour, []).append(shape)
        for colour, shapes in sorted(paths.items()):
            out.append(f'<path fill="{self.colours[colour]}" d="{"".join(shapes)}"/>')
        return [*out, "</g>"]

    def _across(self) -> int:
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
                "drawing needs matplotlib: pip install 'headway[plot]'; an .svg file does not"
            ) from error

        one, across = len(self.panels) == 1, self._across()
        size = (6.4, 6.8) if one else (2.6 * across + 0.6, 2.6 * self._down() + 1.2)
        figure = Figure(figsize=size, dpi=200, layout="constrained")
        FigureCanvasAgg(figure)  # its own canvas: no window, no global state
        q_len, kv_len = self.lengths
        even = max(q_len, kv_len) < 8 * min(q_len, kv_len)
        for n, panel in enumerate(self.panels):
            axes = figure.add_subplot(self._down(), across, n + 1)
            (rows, columns), side = panel.cells.shape, panel.side
            axes.imshow(
                panel.cells.numpy(), cmap=ListedColormap(self.colours), vmin=0,
                vmax=len(self.colours) - 1, interpolation="nearest",
                extent=(0, columns * side[1], rows * side[0], 0),
                aspect="equal" if even else "auto",
            )  # fmt: skip
            axes.set(xlim=(0, kv_len), ylim=(q_len, 0))
            if one:
                axes.set(xlabel="key position", ylabel="query position")
            else:
                axes.set_title(panel.label, fontsize=8)
            if one and max(rows, columns) <= _GRID and len(self.colours) == len(COLOURS):
                _lines(axes, (rows, columns), side)
            axes.tick_params(labelsize=8 if one else 6)
        figure.legend(
            handles=[Patch(facecolor=colour, edgecolor="#888888", linewidth=0.5, label=meaning)
                     for colour, meaning in self.legend],
            loc="outside lower center", ncols=len(self.legend), frameon=False, fontsize=9,
        )  # fmt: skip
        figure.suptitle(self.title, fontsize=10, wrap=True)
        return figure

    def _down(self) -> int:
        return -(-len(self.panels) // self._across())


def _spans(rows: int, side: float, length: int) -> list[tuple[float, float]]:
    """From where to where each row of cells goes."""
    return [(row * side, min((row + 1) * side, length)) for row in range(rows)]


def _runs(line: list[int]) -> list[tuple[int, int, int]]:
    """Stretches of one colour: colour, first cell, end."""
    edges = [0, *(n for n in range(1, len(line)) if line[n] != line[n - 1]), len(line)]
    return [(line[a], a, z) for a, z in pairwise(edges) if a < z]


def _lines(axes: Any, shape: tuple[int, int], side: tuple[float, float]) -> None:
    width = min(0.5, 40 / max(shape))
    style = {"color": "white", "linewidth": width}
    axes.hlines([n * side[0] for n in range(shape[0])], 0, shape[1] * side[1], **style)
    axes.vlines([n * side[1] for n in range(shape[1])], 0, shape[0] * side[0], **style)


# -- block masks ----------------------------------------------------------------------------------


class Tiled(Protocol):
    """What is drawn of a `BlockMask`, which is unknown to this file."""

    @property
    def shape(self) -> tuple[int, int, int, int]: ...

    @property
    def tile(self) -> tuple[int, int]: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def tiles(self) -> Tiles: ...

    def __getitem__(self, index: tuple[int, int], /) -> "Tiled": ...

    def retile(self, tile: tuple[int, int]) -> "Tiled": ...

    def to_dense(self) -> Tensor: ...

    def counts(self) -> tuple[int, int, int]: ...

    def name(self) -> str: ...


def cells(mask: Tiled, most: int, b: int = 0, h: int = 0) -> tuple[Tensor, int]:
    """A batch and head as uint8 `(rows, columns)` with at most `most` along each side, and
    how many tiles a cell stands for along each side.

    0 empty, 1 partial, 2 full, where a cell is full if all its tiles are.
    """
    if 0 in mask.shape[:2]:
        raise ArgumentError(f"a block mask of shape {mask.shape} has no batch or no head to draw")
    step = max(1, -(-max(mask.grid) // most))
    tile = mask.tile[0] * step, mask.tile[1] * step
    return mask[b, h].retile(tile).to_dense()[0, 0].cpu(), step


def of_block_mask(
    mask: Tiled, most: int, panels: int = PANELS, title: str | None = None
) -> Picture:
    """The tiles of its first batches and heads."""
    groups = group_labels(*mask.shape[:2])
    drawn = [(label, *cells(mask, most, b, h)) for label, b, h in groups[:panels]]
    step = drawn[0][2] if drawn else cells(mask, most)[1]
    side = mask.tile[0] * step, mask.tile[1] * step
    found = [Panel(label, state, side) for label, state, _ in drawn]
    full, partial, empty = mask.counts() if len(groups) > 1 else mask[0, 0].counts()
    total = max(full + partial + empty, 1)
    names = zip(COLOURS, ("empty", "partial", "full"), (empty, partial, full), strict=True)
    legend = [(colour, f"{name}: {n:,} ({n / total:.1%})") for colour, name, n in names]
    about = f"tiles of {mask.tile[0]} × {mask.tile[1]}"
    if step > 1:
        about += f", {step} × {step} of them in a cell"
    if len(groups) > len(found):
        about += f"; {len(found)} of {len(groups)} batches and heads"
    title = title or f"{mask.name()}\n{about}"
    key = [(text, meaning) for text, (_, meaning) in zip(_TEXT, legend, strict=True)]
    return Picture(title, found, mask.shape[2:], COLOURS, _TEXT, legend, len(groups), key)


def text(mask: Tiled, rows: int) -> str:
    """The first batch and head as lines of text, at most `rows` of them."""
    most = as_int(rows)
    if most is None or most < 1:
        raise ArgumentError(f"rows={rows!r} must be a positive integer")
    return of_block_mask(mask, most, 1).text()


def draw(mask: Tiled, path: str | PathLike, title: str | None = None) -> None:
    """Write the picture as an image; the file's ending names the format (PNG, SVG, PDF)."""
    most = _VECTORS if fspath(path).lower().endswith(".svg") else _CELLS
    of_block_mask(mask, most, title=title).save(path)


def inline(mask: Tiled) -> str:
    """The picture as SVG, for a notebook."""
    return of_block_mask(mask, 64).svg()


def group_labels(b: int, h: int) -> list[tuple[str, int, int]]:
    """A label for every batch and head that the mask distinguishes."""
    names = []
    for n in range(b):
        for m in range(h):
            words = [f"batch {n}"] * (b > 1) + [f"head {m}"] * (h > 1)
            names.append((", ".join(words), n, m))
    return names


# -- scores ---------------------------------------------------------------------------------------


def of_score(
    score: ScoreFn, mask: MaskFn | None, sizes: tuple[int, int, int, int], most: int,
    panels: int = PANELS,
) -> Picture:  # fmt: skip
    """What a score makes of logits of 0 where a mask keeps the pair, at most `most` positions along
    each side: those in the middle of each cell. Pairs that it makes -inf are not kept."""
    b, h, q_len, kv_len = sizes
    if not all(sizes):
        raise ArgumentError(f"(b, h, q_len, kv_len) = {sizes} has no pair to draw")
    graph, captured = lower_mod("score", score, torch.float32)
    of_mask = None if mask is None else lower_mod("mask", mask, torch.float32)
    graphs = [graph] if of_mask is None else [graph, of_mask[0]]
    b, h = (n if any(g.uses(x) for g in graphs) else 1 for n, x in ((b, "b"), (h, "h")))
    longest = max(q_len, kv_len)
    rows, columns = (min(n, max(1, most * n // longest)) for n in (q_len, kv_len))
    q_idx, kv_idx = (
        ((torch.arange(n, device=CPU) + 0.5) * (length / n)).long()
        for n, length in ((rows, q_len), (columns, kv_len))
    )
    values = []
    groups = group_labels(b, h)
    for _, n, m in groups[:panels]:
        row, head = torch.tensor(n, device=CPU), torch.tensor(m, device=CPU)
        at = Positions(row, head, q_idx[:, None], kv_idx)
        zero = torch.zeros(rows, columns, dtype=torch.float32, device=CPU)
        kept = torch.ones(rows, columns, dtype=torch.bool, device=CPU)
        if of_mask is not None:
            kept = mask_at(*of_mask, at).expand(rows, columns)
        (t,), _ = score_at(graph, captured, at, zero, kept)
        t = torch.as_tensor(t, dtype=torch.float32, device=CPU).detach().expand(rows, columns)
        values.append(t.masked_fill(~kept, -torch.inf))
    t = torch.stack(values)
    seen = t[t.isfinite()]
    low, high = (float(x) for x in seen.aminmax()) if len(seen) else (0.0, 0.0)
    level = ((t - low) * ((_LEVELS - 1) / max(high - low, 1e-30))).round().clamp(0, _LEVELS - 1)
    drawn = torch.where(t.isfinite(), level + 1, 0).to(torch.uint8)
    side = q_len / rows, kv_len / columns
    found = [Panel(g[0], x, side) for g, x in zip(groups, drawn, strict=False)]
    colours = (COLOURS[0], *(_between(n / (_LEVELS - 1)) for n in range(_LEVELS)))
    texts = ("··", *(_SHADES[min(n * 5 // _LEVELS, 4)] for n in range(_LEVELS)))
    steps = range(5 if high > low else 1)
    named = [f"{low + (high - low) * n / 4:.3g}" for n in steps]
    legend = [(_between(n / 4), name) for n, name in zip(steps, named, strict=True)]
    key = [(_SHADES[n], name) for n, name in zip(steps, named, strict=True)]
    if bool((drawn == 0).any()):
        bare = "not finite" if bool(((drawn == 0) & (t != -torch.inf)).any()) else "not kept"
        legend.insert(0, (COLOURS[0], bare))
        key.insert(0, (texts[0], bare))
    title = f"{_name(score)}{'' if mask is None else f', where {_name(mask)}'}\nof logits of 0"
    if len(groups) > len(found):
        title += f"; {len(found)} of {len(groups)} batches and heads"
    return Picture(title, found, (q_len, kv_len), colours, texts, legend, len(groups), key)


def _name(mod: Any) -> str:
    return repr(mod) if isinstance(mod, Mod) else getattr(mod, "__qualname__", repr(mod))


def _between(share: float) -> str:
    """The colour of a share from 0 to 1 of the scale."""
    at = share * (len(_SCALE) - 1)
    n = min(int(at), len(_SCALE) - 2)
    ends = [[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in _SCALE[n : n + 2]]
    mixed = [round(a + (z - a) * (at - n)) for a, z in zip(*ends, strict=True)]
    return "#" + "".join(f"{x:02x}" for x in mixed)
