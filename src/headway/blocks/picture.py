"""Pictures of block masks: text for the terminal, an image for a paper."""

from os import PathLike
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import ArgumentError

CELLS = 1024  # at most that many along each side of an image
_GRID = 160  # up to that many cells, lines between them help the eye
# Empty, partial, full: apart in colour, in grey print, and for colour-blind eyes.
_COLOURS = ("#f4f4f2", "#f2a33a", "#1f4e79")
_TEXT = ("··", "▒▒", "██")


class Picture(NamedTuple):
    """The tiles of one batch row and head, drawn in cells.

    - `cells`: uint8 `(rows, columns)` on the CPU: 0 empty, 1 partial, 2 full, where a cell is full
      if all its tiles are.
    - `step`: tiles in a cell along each side.
    - `tile`, `lengths`: of the block mask; queries, then keys.
    - `counts`: full, partial and empty tiles.
    """

    cells: Tensor
    step: int
    tile: tuple[int, int]
    lengths: tuple[int, ...]
    counts: tuple[int, int, int]

    def text(self) -> str:
        """A line of text for each row of cells."""
        return "\n".join("".join(_TEXT[cell] for cell in line) for line in self.cells.tolist())

    def draw(self, path: str | PathLike, name: str, title: str | None) -> None:
        """Write the picture as an image; the file's ending names the format (PNG, SVG, PDF).

        Without a title, the name of the mask and the size of the tiles stand above it.

        **Raises:** `ArgumentError` for a file that cannot be written, `ImportError` without
        matplotlib.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.colors import ListedColormap
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install 'headway[plot]'") from error

        state, step = self.cells, self.step
        figure = Figure(figsize=(6.4, 6.8), dpi=200, layout="constrained")
        FigureCanvasAgg(figure)  # its own canvas: no window, no global state
        axes = figure.add_subplot()
        q_len, kv_len = self.lengths
        side = self.tile[0] * step, self.tile[1] * step
        axes.imshow(
            state.numpy(), cmap=ListedColormap(_COLOURS), vmin=0, vmax=2, interpolation="nearest",
            extent=(0, state.shape[1] * side[1], state.shape[0] * side[0], 0),
            aspect="equal" if max(q_len, kv_len) < 8 * min(q_len, kv_len) else "auto",
        )  # fmt: skip
        axes.set(xlim=(0, kv_len), ylim=(q_len, 0), xlabel="key position", ylabel="query position")
        if max(state.shape) <= _GRID:
            _lines(axes, state.shape, side)
        axes.tick_params(labelsize=8)
        full, partial, empty = self.counts
        total = max(full + partial + empty, 1)
        names = zip(("empty", "partial", "full"), (empty, partial, full), _COLOURS, strict=True)
        figure.legend(
            handles=[Patch(facecolor=colour, edgecolor="#888888", linewidth=0.5,
                           label=f"{name}: {n:,} ({n / total:.1%})") for name, n, colour in names],
            loc="outside lower center", ncols=3, frameon=False, fontsize=9,
        )  # fmt: skip
        about = f"tiles of {self.tile[0]} × {self.tile[1]}"
        if step > 1:
            about += f", {step} × {step} of them in a cell"
        axes.set_title(title or f"{name}\n{about}", fontsize=10, wrap=True)
        try:
            figure.savefig(path)
        except (
            ValueError,
            OSError,
        ) as error:  # an ending that matplotlib does not know; a full disk
            raise ArgumentError(f"cannot draw to {path}: {error}") from error


def _lines(axes: Any, shape: tuple[int, ...], side: tuple[int, int]) -> None:
    width = min(0.5, 40 / max(shape))
    style = {"color": "white", "linewidth": width}
    axes.hlines([n * side[0] for n in range(shape[0])], 0, shape[1] * side[1], **style)
    axes.vlines([n * side[1] for n in range(shape[1])], 0, shape[0] * side[0], **style)
