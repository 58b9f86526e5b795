"""What an experiment found: a table, curves, and the checks that make it a claim."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .train import TrainingCurves


class Check(NamedTuple):
    """A statement and whether it came out true."""

    statement: str
    passed: bool


@dataclass(frozen=True)
class Experiment:
    """`columns` and `rows` of the table; `curves` by panel title, then by label; `reading`: what
    it shows, and what it does not; `level`: a logit to draw a line at, with its name."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    curves: dict[str, dict[str, TrainingCurves]]
    checks: list[Check]
    reading: str
    level: tuple[str, float] | None = None

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def draw(self, path: Path) -> None:
        """Draw loss above, max logit below, a column per panel. Needs matplotlib."""
        from matplotlib.figure import Figure  # slow to import, and an extra
        from matplotlib.ticker import LogFormatter, MaxNLocator

        panels = list(self.curves)
        figure = Figure(figsize=(4.6 * len(panels), 6.4), dpi=144, layout="constrained")
        axes = figure.subplots(2, len(panels), squeeze=False, sharex="col")
        for column, panel in zip(axes.T, panels, strict=True):
            for number, (label, run) in enumerate(self.curves[panel].items()):
                # Curves that coincide stay visible: each next one is thinner and dashed.
                style = {"linestyle": ("-", "--", ":", "-.")[number % 4], "linewidth": 1.8}
                column[0].plot(_smooth(run.losses), label=label, **style)
                column[1].plot(run.max_logits, **style)
            column[0].set_title(panel, fontsize=10)
            column[0].legend(frameon=False, fontsize=8)
            column[1].set(xlabel="step", yscale="log")
            if self.level is not None:
                name, height = self.level
                column[1].axhline(height, color="#6b7280", linewidth=1, linestyle=":", label=name)
                column[1].legend(*_last(column[1]), frameon=False, fontsize=8)
            for ticks in (column[1].yaxis.set_major_formatter, column[1].yaxis.set_minor_formatter):
                ticks(LogFormatter(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
            column[1].xaxis.set_major_locator(MaxNLocator(integer=True))
            for axis in column:
                axis.spines[["top", "right"]].set_visible(False)
                axis.grid(color="#e5e7eb", linewidth=0.6)
        axes[0, 0].set_ylabel("loss (nats per byte)")
        axes[1, 0].set_ylabel("largest max logit")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _last(axis: Any) -> tuple[list, list]:
    """Return the legend of the last line alone: the curves have theirs above."""
    handles, labels = axis.get_legend_handles_labels()
    return handles[-1:], labels[-1:]


def _smooth(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """Compute an exponential moving average, free of the bias of its start."""
    average, weight, out = 0.0, 0.0, []
    for value in values:
        average, weight = keep * average + (1 - keep) * value, keep * weight + 1 - keep
        out.append(average / weight)
    return out
