"""The pictures of a run, from its metrics."""

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import write_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PALE, ACCENT = "#1f2937", "#b6c2d2", "#c2410c"


def draw(records: list[dict[str, Any]], folder: Path, tau: float | None = None) -> None:
    """Write loss.png and max_logit.png; `tau` is QK-Clip's. Needs matplotlib."""
    if not records:
        return
    figures = {"loss": loss_figure(records)}
    if records[0]["max_logit"]:  # F.sdpa knows none
        figures["max_logit"] = max_logit_figure(records, tau)
    for name, figure in figures.items():
        figure.suptitle(folder.name, fontsize=10, color=INK)
        write_beside(folder / f"{name}.png", lambda p, f=figure: f.savefig(p, format="png"))


def loss_figure(records: list[dict[str, Any]]) -> "Figure":
    """Draw bits per byte over the steps, on the text trained on and on the held-out files."""
    figure, (axis,) = _figure(1)
    steps = [r["step"] for r in records]
    bits = [r["bits_per_byte"] for r in records]
    axis.plot(steps, bits, color=PALE, linewidth=0.7)
    axis.plot(steps, _smooth(bits), color=INK, linewidth=1.6, label="training text (smoothed)")
    looks = [r for r in records if "held_out_bits_per_byte" in r]
    if looks:
        x, held_out = ([r[key] for r in looks] for key in ("step", "held_out_bits_per_byte"))
        axis.plot(x, held_out, "o-", color=ACCENT, markersize=3, linewidth=1.2, label="held out")
        axis.annotate(
            f" {held_out[-1]:.2f}", (x[-1], held_out[-1]), (3, 0), textcoords="offset points",
            color=ACCENT, weight="bold", va="center", annotation_clip=False,
        )  # fmt: skip
    axis.set(xlabel="step", ylabel="bits per byte", ylim=(0, min(8.6, max(bits) * 1.07)))
    _along_steps(axis)
    axis.legend(frameon=False, loc="upper right")
    return figure


def max_logit_figure(records: list[dict[str, Any]], tau: float | None = None) -> "Figure":
    """Draw the largest logit of each layer over the steps, of each head over the last tenth."""
    import matplotlib

    figure, (lines, heat) = _figure(2)
    steps = [r["step"] for r in records]
    depth, heads = len(records[0]["max_logit"]), len(records[0]["max_logit"][0])
    colors = matplotlib.colormaps["viridis"]
    for layer in range(depth):
        color = colors(0.9 * layer / max(1, depth - 1))
        largest = [max(r["max_logit"][layer]) for r in records]
        lines.plot(steps, largest, color=color, linewidth=0.5, alpha=0.3)
        lines.plot(steps, _smooth(largest), color=color, linewidth=1.6, label=f"layer {layer}")
    if tau is not None and max(max(map(max, r["max_logit"])) for r in records) > tau / 2:
        lines.axhline(tau, color=ACCENT, linewidth=1, linestyle="--", label=f"tau {tau:g}")
    lines.legend(frameon=False, loc="best", ncols=1 + depth // 8, fontsize=8)
    lines.set(xlabel="step", ylabel="largest logit")
    lines.set_title("every layer", fontsize=10, loc="left")
    _along_steps(lines)
    tail = records[-max(1, len(records) // 10) :]
    grid = [[max(r["max_logit"][l][h] for r in tail) for h in range(heads)] for l in range(depth)]
    image = heat.imshow(grid, cmap="viridis", aspect="auto")
    middle = (min(map(min, grid)) + max(map(max, grid))) / 2
    if depth * heads <= 144:  # beyond that the numbers no longer fit
        for l, row in enumerate(grid):
            for h, value in enumerate(row):
                color = "white" if value < middle else "black"
                heat.text(h, l, f"{value:.1f}", ha="center", va="center", color=color, fontsize=8)
    else:
        figure.colorbar(image, ax=heat)
    heat.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(depth))
    heat.set_title(f"every head, over the last {len(tail)} steps", fontsize=10, loc="left")
    heat.spines[:].set_visible(False)
    heat.grid(visible=False)
    return figure


def _figure(panels: int) -> tuple["Figure", list["Axes"]]:
    from matplotlib.figure import Figure  # slow to import, and an extra

    figure = Figure(figsize=(4.2 + 2.9 * panels, 4.2), dpi=144, layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e7eb", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def _along_steps(axis: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axis.margins(x=0.02)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _smooth(values: list[float]) -> list[float]:
    """Return the mean over a window around each value, a thirtieth of all; narrower at the start,
    where values fall fast, so that it lags nowhere."""
    sums = [0.0, *accumulate(values)]
    reach = len(values) // 60
    ends = [(n - min(n, reach), n + 1 + min(n, reach)) for n in range(len(values))]
    ends = [(low, min(len(values), high)) for low, high in ends]
    return [(sums[high] - sums[low]) / (high - low) for low, high in ends]
