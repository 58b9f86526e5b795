"""The picture and the table of speeds, from the CSVs of `headway bench`:

    python -m headway_lab.bench.figures picture RESULTS.csv PICTURE.svg
    python -m headway_lab.bench.figures curve RESULTS.csv PICTURE.svg
    python -m headway_lab.bench.figures table FILE.csv...

The picture shows bars of TFLOP/s over kept pairs, forward and backward, as the file has them: no
number is written by hand. The curve shows the same over the length. The table takes a case that is
in several files from the first of them.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from headway.errors import ArgumentError, HeadwayError

from .case import BACKWARD, FORWARD
from .results import Speeds, speeds_in

# What is shown: of calls at full size, those that differ in what they compute.
BARS = {
    "rows-8k-128-causal": "causal",
    "rows-8k-128-full": "no mask",
    "rows-user-causal": "causal, the user's score:\n1.1 s + 0.01 (j − i) + 0.5",
    "rows-alibi-causal": "causal, ALiBi",
    "rows-softcap-causal": "causal, softcap",
    "rows-window-1024": "sliding window of 1024",
    "rows-documents-causal": "causal, twelve documents",
}
COLOURS = {
    "headway": ("Headway", "#c2410c"),
    "flash-attention-4": ("FlashAttention-4", "#475569"),
    "flex flash": ("FlexAttention, FLASH", "#8596ab"),
    "cudnn": ("cuDNN", "#b6c2d2"),
    "flex": ("FlexAttention, Triton", "#d8dfe7"),
}
CURVE = re.compile(r"curve-(\d+)k-128-causal")


def read(path: Path) -> tuple[str, Speeds]:
    """Return the device of a file of results, and the speeds to show. Raises ArgumentError."""
    device, speeds = speeds_in(path)
    return device, {
        key: speed for key, speed in speeds.items() if key[0] in BARS and key[2] in COLOURS
    }


def draw_curve(results: Path, picture: Path) -> None:
    """Write the picture of speeds over the length, of the same number of tokens.

    **Raises:** as for `draw`.
    """
    device, speeds = speeds_in(results)
    lengths = {case: int(n[1]) for case, _, _ in speeds if (n := CURVE.fullmatch(case))}
    if not lengths:
        raise ArgumentError(f"{results} has no case curve-…k-128-causal")

    def panel(axis: Any, direction: str) -> None:
        for contestant, (name, colour) in COLOURS.items():
            points = sorted(
                (lengths[case], speed) for (case, there, who), speed in speeds.items()
                if case in lengths and (there, who) == (direction, contestant)
            )  # fmt: skip
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, label=name, marker="o", ms=3)
        axis.set_xscale("log", base=2)
        ticks = sorted(set(lengths.values()))
        axis.set_xticks(ticks, [f"{n}k" for n in ticks], fontsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", color="#e5e7eb", linewidth=0.6)

    where = f"length; TFLOP/s of kept pairs, causal, 128 wide, bfloat16, {device}"
    _write(picture, panel, where, high=3.4)


def draw(results: Path, picture: Path) -> None:
    """Write the picture; a case that the file lacks is left out.

    **Raises:** `ArgumentError` where there is nothing to show, `ImportError` without matplotlib.
    """
    device, speeds = read(results)
    cases = [case for case in BARS if any(key[0] == case for key in speeds)]
    if not cases:
        raise ArgumentError(f"{results} has none of the cases {', '.join(BARS)}")

    def panel(axis: Any, direction: str) -> None:
        _bars(axis, direction, cases, speeds)
        if direction == FORWARD:
            axis.set_yticks(range(len(cases)), [BARS[case] for case in cases], fontsize=9)
            axis.invert_yaxis()

    where = f"TFLOP/s of kept pairs, bfloat16, {device}"
    _write(picture, panel, where, high=0.9 + 0.8 * len(cases))


def _write(picture: Path, panel: Callable[[Any, str], None], where: str, high: float) -> None:
    """Write a picture of two panels, forward and backward, under one legend."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install matplotlib") from error
    # Text stays text, small and sharp, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "headway"}):
        figure = Figure(figsize=(9.2, high), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True, sharex=True)
        for axis, direction in zip(panels, (FORWARD, BACKWARD), strict=True):
            panel(axis, direction)
            axis.set_title(direction, fontsize=10, loc="left")
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.tick_params(left=False, labelsize=8)
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper right",
            ncols=len(COLOURS), frameon=False, fontsize=9,
        )  # fmt: skip
        figure.supxlabel(where, fontsize=9)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _bars(axis: Any, direction: str, cases: list[str], speeds: Speeds) -> None:
    height, middle = 0.86 / len(COLOURS), (len(COLOURS) - 1) / 2
    for n, (contestant, (name, colour)) in enumerate(COLOURS.items()):
        keys = {(case, direction, contestant): row for row, case in enumerate(cases)}
        timed = {
            row + (n - middle) * height: speeds[key] for key, row in keys.items() if key in speeds
        }
        if not timed:
            continue
        bars = axis.barh(
            list(timed), list(timed.values()), height * 0.92, color=colour, label=name
        )  # fmt: skip
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2, color="#475569")
    axis.grid(axis="x", color="#e5e7eb", linewidth=0.6)
    axis.set_axisbelow(True)


# The cases that a page shows, in its order and words.
ROWS = {
    "8k-128-causal": "8k, 128 wide, causal",
    "8k-128-full": "8k, 128 wide, full",
    "8k-64-causal": "8k, 64 wide, causal",
    "8k-64-full": "8k, 64 wide, full",
    "softcap-causal": "8k, causal with a softcap",
    "alibi-causal": "8k, causal with ALiBi",
    "user-causal": "8k, causal with a user's function",
    "window-1024": "8k, sliding window of 1024",
    "documents-causal": "8k, twelve documents, causal",
    "packed-512-128-causal": "64 documents of 512, causal",
    "8k-192-128-causal": "8k, MLA (192 and 128), causal",
    "16k-256-causal": "16k, 256 wide, causal",
    "short-512-128-causal": "512, 128 wide, causal",
    "short-256-64-causal": "256, 64 wide, causal",
    "relative-bias-learned-causal": (
        "8k, learned relative bias, causal (FlexAttention does not compile it)"
    ),
    "float32-2k-128-full": "2k, 128 wide, float32",
}
COLUMNS = {
    "headway": "Headway", "flex": "FlexAttention", "cudnn": "cuDNN",
    "flash-attention-4": "FlashAttention-4",
}  # fmt: skip
FASTER = 1.02  # bold where another has this many times the speed: less may be noise

ByCase = dict[str, dict[tuple[str, str], float]]  # by case, contestant and direction


def speeds(paths: Iterable[Path]) -> ByCase:
    """Return TFLOP/s of kept pairs of each case, from the first file that has it."""
    by_case: ByCase = {}
    for path in paths:
        before = set(by_case)
        for (case, direction, contestant), speed in speeds_in(path)[1].items():
            if case not in before:
                by_case.setdefault(case, {})[contestant, direction] = speed
    return by_case


def table(paths: Iterable[Path]) -> str:
    """Return Markdown, forward / backward in each cell; **bold** where another is faster."""
    by_case = speeds(paths)
    cases = [name for name in ROWS if name in by_case]
    if not cases:
        raise ArgumentError(f"no speed of a case that the table shows: {', '.join(ROWS)}")
    rows = [["", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    rows += [[ROWS[name], *(_cell(by_case[name], who) for who in COLUMNS)] for name in cases]
    padded = ([f" {cell} " if cell else " " for cell in row] for row in rows)
    return "\n".join(f"|{'|'.join(row)}|" for row in padded)


def _cell(case: dict[tuple[str, str], float], who: str) -> str:
    """Return "709 / 671", or "" for a contestant that was not timed."""
    both = []
    for direction in (FORWARD, BACKWARD):
        speed, ours = case.get((who, direction)), case["headway", direction]
        if speed is None:
            return ""
        both.append(f"**{speed:.0f}**" if speed > FASTER * ours else f"{speed:.0f}")
    return " / ".join(both)


def main(arguments: list[str]) -> int:
    """Draw the picture or print the table; return 0, or 2 after a message for a mistake."""
    try:
        match arguments:
            case ["picture", results, picture]:
                draw(Path(results), Path(picture))
            case ["curve", results, picture]:
                draw_curve(Path(results), Path(picture))
            case ["table", _, *_]:
                sys.stdout.write(table(map(Path, arguments[1:])) + "\n")
            case _:
                raise ArgumentError(
                    "use: picture RESULTS.csv PICTURE.svg, curve RESULTS.csv PICTURE.svg, "
                    "or: table FILE.csv..."
                )
    except (HeadwayError, ImportError) as error:
        sys.stderr.write(f"headway_lab.bench.figures: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
