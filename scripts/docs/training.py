"""The plots and tables of docs/training.md, from bench/results/runs alone.

A run of runs is a folder there: one file per arm, as scripts/training_runs.py writes it. What was not
run yet is not drawn, and the page says so.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from svg import BLUE, GREEN, GREY, ORANGE, PURPLE, box, svg, text

RUNS = Path(__file__).resolve().parents[2] / "bench" / "results" / "runs"
Points = Sequence[tuple[float, float]]
SCALINGS = {"logits": BLUE, "query": GREEN, "init": ORANGE, "none": PURPLE}
OPTIMIZERS = {"adamw": "AdamW", "adafactor": "Adafactor"}
TAU = 100.0
MISSING = "*Not run yet.*"


class Arm(NamedTuple):
    """A run: what was run on what, and a line for every few steps."""

    head: dict[str, Any]
    lines: list[dict[str, Any]]

    def curve(self, value: str | Callable[[dict[str, Any]], float]) -> Points:
        """A number over the millions of bytes read."""
        of = (lambda line: line[value]) if isinstance(value, str) else value
        return [(line["tokens"] / 1e6, of(line)) for line in self.lines]

    @property
    def held_out(self) -> float:
        """Bits per byte of all held-out text, at the end."""
        return self.lines[-1]["held_out_bits_per_byte"]

    @property
    def peak(self) -> float:
        return max(map(largest, self.lines))

    @property
    def late_peak(self) -> float:
        """The largest logit after the warm-up."""
        warm = round(self.head["config"]["warmup"] * self.head["config"]["steps"])
        before = [0, *(line["step"] for line in self.lines)]
        return max(largest(line) for n, line in enumerate(self.lines) if before[n] >= warm)

    @property
    def speed(self) -> float:
        return self.head["tokens_per_second"]


@cache
def arms() -> Mapping[str, Arm]:
    """By name; of an arm that was run twice, the later."""
    found = {}
    for path in sorted(RUNS.rglob("*.jsonl")):
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        found[head["arm"]] = Arm(head, lines)
    return found


def largest(line: dict[str, Any]) -> float:
    return max(line["max_logit"])


def pictures() -> dict[str, str]:
    drawn = {
        "baseline": baseline(),
        "variants": variants(),
        "logits": logits(),
        "scaling": scaling(),
    }
    return {f"pictures/training-{name}.svg": svg for name, svg in drawn.items() if svg}


def baseline() -> str | None:
    """Headway and F.sdpa, two seeds each, and how far apart they are."""
    names = {
        "F.sdpa, seed 0": ("sdpa-0", GREY), "F.sdpa, seed 1": ("sdpa-1", GREEN),
        "Headway, seed 0": ("headway-0", ORANGE), "Headway, seed 1": ("headway-1", PURPLE),
    }  # fmt: skip
    if any(arm not in arms() for arm, _ in names.values()):
        return None
    curves = {name: (arms()[arm].curve("bits_per_byte"), c) for name, (arm, c) in names.items()}
    apart = {
        "Headway − F.sdpa, seed 0": (difference("headway-0", "sdpa-0"), ORANGE),
        "Headway − F.sdpa, seed 1": (difference("headway-1", "sdpa-1"), PURPLE),
        "F.sdpa, seed 1 − seed 0": (difference("sdpa-1", "sdpa-0"), GREEN),
    }
    return figure(
        [Panel("bits per byte of the text read", curves, clip=0.98),
         Panel("difference in bits per byte", apart, around_zero=True)],
        "Training curves of Headway and of F.sdpa",
    )  # fmt: skip


def variants() -> str | None:
    """Documents, softcap, and two GPUs."""
    names = {
        "causal": ("headway-0", GREY), "documents": ("documents", BLUE),
        "softcap 50": ("softcap", ORANGE), "documents, two GPUs": ("documents-2-gpus", GREEN),
    }  # fmt: skip
    there = {name: pair for name, pair in names.items() if pair[0] in arms()}
    if len(there) < 3:
        return None
    curves = {name: (arms()[arm].curve("bits_per_byte"), c) for name, (arm, c) in there.items()}
    panels = [Panel("bits per byte of the text read", curves, clip=0.98)]
    if "documents-2-gpus" in arms():
        apart = {"two GPUs − one GPU": (difference("documents-2-gpus", "documents"), GREEN)}
        panels.append(Panel("difference in bits per byte", apart, around_zero=True))
    return figure(panels, "Training curves with documents, with a softcap, and on two GPUs")


def logits() -> str | None:
    """Largest logits and losses where logits explode, with QK-Clip and without."""
    panels = []
    for kind in ("gqa", "mla"):
        names = {
            "no clip, seed 0": (f"explode-{kind}-0", ORANGE),
            "no clip, seed 1": (f"explode-{kind}-1", PURPLE),
            f"QK-Clip, tau {TAU:g}": (f"explode-{kind}-clip", BLUE),
        }
        there = {name: pair for name, pair in names.items() if pair[0] in arms()}
        if len(there) < 2:
            continue
        kind = kind.upper()
        largest_ones = {name: (arms()[arm].curve(largest), c) for name, (arm, c) in there.items()}
        panels.append(Panel(f"{kind}: largest logit", largest_ones, log=True, line=TAU))
        losses = {n: (arms()[arm].curve("bits_per_byte"), c) for n, (arm, c) in there.items()}
        panels.append(Panel(f"{kind}: bits per byte of the text read", losses, clip=0.98))
    return figure(panels, "Largest logits and losses with QK-Clip and without") if panels else None


def scaling() -> str | None:
    """Held-out loss by learning rate, for every place of the scale."""
    panels = []
    for optimizer, words in OPTIMIZERS.items():
        curves = {}
        for where, colour in SCALINGS.items():
            start = f"scaling-{where}-{optimizer}-"
            found = [(float(a.removeprefix(start)), arm.held_out)
                     for a, arm in arms().items() if a.startswith(start)]  # fmt: skip
            if found:
                name = "nowhere" if where == "none" else where
                curves[name] = (sorted(found), colour)
        if curves:
            title = f"{words}: held-out bits per byte"
            panels.append(Panel(title, curves, log_x=True, x="learning rate"))
    if not panels:
        return None
    return figure(panels, "Held-out loss by learning rate and by where the scale lives")


def difference(one: str, other: str) -> Points:
    """Of the bits per byte of two arms, step by step, smoothed over nine lines."""
    pairs = list(zip(arms()[one].curve("bits_per_byte"), arms()[other].curve("bits_per_byte"),
                     strict=True))  # fmt: skip
    raw = [(x, a - b) for (x, a), (_, b) in pairs]
    return [(x, fmean(y for _, y in raw[max(0, n - 4) : n + 5])) for n, (x, _) in enumerate(raw)]


# -- tables ---------------------------------------------------------------------------------------


def said() -> dict[str, str]:
    """What docs/training.md says between its marks, by their names."""
    drawn = pictures()

    def with_picture(name: str, alt: str, arms_: Iterable[str]) -> str:
        there = [arm for arm in arms_ if arm in arms()]
        if not there:
            return MISSING
        path = f"pictures/training-{name}.svg"
        parts = [table(there), reading(name), f"![{alt}]({path})" if path in drawn else ""]
        return "\n\n".join(part for part in parts if part)

    return {
        "made-by": made_by(),
        "baseline": with_picture(
            "baseline", "Curves of Headway and of F.sdpa",
            ("sdpa-0", "headway-0", "sdpa-1", "headway-1"),
        ),
        "variants": with_picture(
            "variants", "Curves of documents, softcap and two GPUs",
            ("documents", "documents-2-gpus", "softcap"),
        ),
        "logits": with_picture(
            "logits", "Largest logits and losses, with QK-Clip and without",
            [f"explode-{kind}-{what}" for kind in ("gqa", "mla") for what in ("0", "1", "clip")],
        ),
        "scaling": scaling_table() + (
            "\n\n![Held-out loss by learning rate](pictures/training-scaling.svg)"
            if "pictures/training-scaling.svg" in drawn else ""
        ),
    }  # fmt: skip


def reading(name: str) -> str:
    """The numbers of a section that its claims are about."""
    if name == "baseline" and {"sdpa-0", "sdpa-1", "headway-0", "headway-1"} <= arms().keys():
        seeds = (0, 1)
        faster = [arms()[f"headway-{n}"].speed / arms()[f"sdpa-{n}"].speed for n in seeds]
        apart = [arms()[f"headway-{n}"].held_out - arms()[f"sdpa-{n}"].held_out for n in seeds]
        spread = arms()["sdpa-1"].held_out - arms()["sdpa-0"].held_out
        return (
            f"Headway's tokens/s are {faster[0]:.3f} and {faster[1]:.3f} times those of F.sdpa "
            f"(seeds 0 and 1; the two runs of a seed had the same GPU). Its held-out bits per byte differ by {_signed(apart[0])} and "
            f"{_signed(apart[1])}; the two seeds of F.sdpa differ by {_signed(spread)}."
        )
    if name == "logits":
        clipped = {kind: arms().get(f"explode-{kind}-clip") for kind in ("gqa", "mla")}
        said = [f"{arm.late_peak:.0f} ({kind.upper()})" for kind, arm in clipped.items() if arm]
        if said:
            return (
                "With QK-Clip the largest logit of any step after the warm-up is "
                f"{' and '.join(said)}: tau is {TAU:g}."
            )
    return ""


def table(names: Sequence[str]) -> str:
    """A row per arm."""
    rows = [
        "| arm | held-out bits per byte | tokens/s | training | whole | largest logit | GPU | "
        "commit | command |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        arm = arms()[name]
        head, peak = arm.head, f"{arm.peak:,.0f}" if arm.lines[0]["max_logit"] else ""
        rows.append(
            f"| {name} | {arm.held_out:.4f} | {head['tokens_per_second']:,} | "
            f"{head['seconds_training']:.0f} s | {head['seconds']:.0f} s | {peak} | "
            f"{card(head['device'])} | `{head['commit'][:7]}` | `{head['command']}` |"
        )
    return "\n".join(rows)


def card(device: str) -> str:
    """Return the short name of a GPU: H100 of "NVIDIA H100 80GB HBM3"."""
    return device.removeprefix("NVIDIA ").split()[0]


def scaling_table() -> str:
    """Held-out bits per byte and the largest logit, a row per optimizer and learning rate."""
    found = {name: arm for name, arm in arms().items() if name.startswith("scaling-")}
    if not found:
        return MISSING
    ends = sorted({tuple(name.rsplit("-", 2)[1:]) for name in found},
                  key=lambda end: (list(OPTIMIZERS).index(end[0]), float(end[1])))  # fmt: skip
    rows = ["| optimizer, learning rate | " + " | ".join(SCALINGS) + " |",
            "| --- |" + " --- |" * len(SCALINGS)]  # fmt: skip
    for optimizer, rate in ends:
        cells = []
        for where in SCALINGS:
            arm = found.get(f"scaling-{where}-{optimizer}-{rate}")
            cells.append("" if arm is None else f"{arm.held_out:.4f} ({arm.peak:,.0f})")
        rows.append(f"| {OPTIMIZERS[optimizer]}, {rate} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def made_by() -> str:
    """On what, with what, of which text."""
    if not arms():
        return MISSING
    heads = [arm.head for arm in arms().values()]
    lines = sorted({
        f"{h['device']}, {h['date']}, PyTorch {h['versions']['torch']}, "
        f"Triton {h['triton']}, Python {h['versions']['python']}" for h in heads
    })  # fmt: skip
    texts = sorted({
        f"{h['corpus']['train']['files']:,} files of {h['corpus']['train']['bytes'] / 1e6:.1f} MB "
        f"to train on, {h['corpus']['held_out']['files']:,} of "
        f"{h['corpus']['held_out']['bytes'] / 1e6:.1f} MB held out, "
        f"SHA-256 `{h['corpus']['sha256'][:16]}`" for h in heads
    })  # fmt: skip
    speeds = f"{sum(h['seconds'] for h in heads) / 60:.0f} minutes in all"
    return "; ".join(lines) + f". {'; '.join(texts)}. {len(heads)} runs, {speeds}."


# -- drawing --------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """Curves over one pair of axes: name -> points, colour."""

    title: str
    curves: dict[str, tuple[Points, str]]
    log: bool = False
    log_x: bool = False
    line: float | None = None
    x: str = "million bytes read"
    clip: float = 1.0  # share of the values, from below, that the axis has to hold
    around_zero: bool = False  # the axis holds three times the median of the absolute values


WIDTH, HEIGHT, LEFT, TOP = 300.0, 190.0, 46.0, 30.0


def figure(panels: Sequence[Panel], title: str) -> str:
    """Two panels in a row, each under its names."""
    parts: list[str] = []
    names = max(len(panel.curves) for panel in panels)
    high = TOP + 14 * math.ceil(names / 2) + HEIGHT + 36
    for n, panel in enumerate(panels):
        x, y = n % 2 * (LEFT + WIDTH + 16), n // 2 * high
        parts += _panel(panel, x + LEFT, y + TOP + 14 * math.ceil(names / 2), x)
    rows = math.ceil(len(panels) / 2)
    columns = min(2, len(panels))
    return svg(columns * (LEFT + WIDTH) + (columns - 1) * 16 + 14, rows * high, parts, title)


def _panel(panel: Panel, x: float, y: float, left: float) -> list[str]:
    parts = [text(left + 4, y - HEIGHT / 190 * 14 - 14 * math.ceil(len(panel.curves) / 2) + 2,
                  panel.title, more='font-weight="600"')]  # fmt: skip
    for n, (name, (_, colour)) in enumerate(panel.curves.items()):
        at = left + 4 + n % 2 * (WIDTH + LEFT) / 2
        line = y - 12 - 14 * (math.ceil(len(panel.curves) / 2) - 1 - n // 2)
        parts.append(box(at, line - 8, 10, 10, f'fill="{colour}"'))
        parts.append(text(at + 14, line, name))
    points = [p for curve, _ in panel.curves.values() for p in curve]
    across = _Axis([p[0] for p in points], panel.log_x)
    ys = sorted(p[1] for p in points)
    ys = ys[: max(1, round(panel.clip * len(ys)))]
    if panel.around_zero:
        bound = 3 * median(map(abs, ys)) or 1e-6
        ys = [-bound, bound]
    up = _Axis([*ys, *([panel.line] if panel.line else [])], panel.log, room=0.06)
    parts.append(box(x, y, WIDTH, HEIGHT, f'fill="{GREY}" fill-opacity="0.1"'))
    for value in up.ticks():
        at = y + HEIGHT * (1 - up.at(value))
        parts.append(f'<path d="M{x:g} {at:.1f}h{WIDTH:g}" stroke="{GREY}" stroke-opacity="0.25"/>')
        parts.append(text(x - 4, at + 4, _words(value), "end"))
    for value in across.ticks():
        parts.append(text(x + WIDTH * across.at(value), y + HEIGHT + 14, _words(value), "middle"))
    parts.append(text(x + WIDTH, y + HEIGHT + 28, panel.x, "end"))
    if panel.line is not None:
        at = y + HEIGHT * (1 - up.at(panel.line))
        parts.append(
            f'<path d="M{x:g} {at:.1f}h{WIDTH:g}" stroke="{GREY}" stroke-dasharray="4 3"/>'
        )
    for curve, colour in panel.curves.values():
        inside = [(a, b) for a, b in curve if up.low <= b <= up.high]
        way = " ".join(
            f"{x + WIDTH * across.at(a):.1f},{y + HEIGHT * (1 - up.at(b)):.1f}" for a, b in inside
        )
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
    return parts


class _Axis:
    """From the least to the most of some numbers, on a line of length one."""

    def __init__(self, values: Sequence[float], log: bool, room: float = 0.0):
        self.log = log
        low, high = (self._of(f(values)) for f in (min, max))
        more = room * (high - low)
        self._low, self._high = low - more, max(high + more, low - more + 1e-9)
        self.low, self.high = (10**v if log else v for v in (self._low, self._high))

    def _of(self, value: float) -> float:
        return math.log10(max(value, 1e-6)) if self.log else value

    def at(self, value: float) -> float:
        return (self._of(value) - self._low) / (self._high - self._low)

    def ticks(self) -> list[float]:
        if self.log:
            steps = [s * 10.0**e for e in range(-6, 9) for s in (1, 3)]
            return [value for value in steps if self.low <= value <= self.high]
        size = 10 ** math.floor(math.log10((self._high - self._low) / 4))
        step = next(
            (s * size for s in (1, 2, 5, 10) if (self._high - self._low) / (s * size) <= 5), size
        )
        first = math.ceil(self._low / step)
        return [n * step for n in range(first, math.floor(self._high / step) + 1)]


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def _words(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3g}".replace("-", "−")
