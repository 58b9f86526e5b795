"""The picture and the table of speeds, from the CSVs of `headway bench`:

    python -m headway_lab.bench.figures picture RESULTS.csv PICTURE.svg
    python -m headway_lab.bench.figures table FILE.csv...

The picture shows bars of TFLOP/s over kept pairs, forward and backward, as the file has them: no
number is written by hand. The table takes a case that is in several files from the first of them.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from headway.errors import ArgumentError, HeadwayError

from .case import BACKWARD, FORWARD
from .results import Speeds, speeds_in

# What is shown: of calls at full size, those that differ in what they compute.
BARS = {
    "8k-128-causal": "causal",
    "user-causal": "causal, the user's score:\n1.1 s + 0.01 (j − i) + 0.5",
    "alibi-causal": "causal, ALiBi",
    "softcap-causal": "causal, softcap",
    "relative-bias-learned-causal": "causal, learned relative bias",
    "window-1024": "sliding window of 1024",
    "documents-causal": "causal, twelve documents",
    "8k-192-128-causal": "causal, MLA (192 and 128)",
}
COLOURS = {
    "headway": ("Headway", "#c2410c"),
    "flex": ("FlexAttention", "#64748b"),
    "flash-attention-4": ("FlashAttention-4", "#b6c2d2"),
}


def read(path: Path) -> tuple[str, Speeds]:
    """Return the device of a file of results, and the speeds to show. Raises ArgumentError."""
    device, speeds = speeds_in(path)
    return device, {
        key: speed for key, speed in speeds.items() if key[0] in BARS and key[2] in COLOURS
    }


def draw(results: Path, picture: Path) -> None:
    """Write the picture; a case that the file lacks is left out.

    **Raises:** `ArgumentError` where there is nothing to show, `ImportError` without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install matplotlib") from error
    device, speeds = read(results)
    cases = [case for case in BARS if any(key[0] == case for key in speeds)]
    if not cases:
        raise ArgumentError(f"{results} has none of the cases {', '.join(BARS)}")
    # Text stays text, small and sharp, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "headway"}):
        figure = Figure(figsize=(9.2, 0.9 + 0.62 * len(cases)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True, sharex=True)
        for axis, direction in zip(panels, (FORWARD, BACKWARD), strict=True):
            _bars(axis, direction, cases, speeds)
        panels[0].set_yticks(range(len(cases)), [BARS[case] for case in cases], fontsize=9)
        panels[0].invert_yaxis()
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper right",
            ncols=len(COLOURS), frameon=False, fontsize=9,
        )  # fmt: skip
        figure.supxlabel(f"TFLOP/s of kept pairs, bfloat16, {device}", fontsize=9)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _bars(axis, direction: str, cases: list[str], speeds: Speeds) -> None:
    height = 0.8 / len(COLOURS)
    for n, (contestant, (name, colour)) in enumerate(COLOURS.items()):
        keys = {(case, direction, contestant): row for row, case in enumerate(cases)}
        timed = {row + (n - 1) * height: speeds[key] for key, row in keys.items() if key in speeds}
        if not timed:
            continue
        bars = axis.barh(
            list(timed), list(timed.values()), height * 0.92, color=colour, label=name
        )  # fmt: skip
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2, color="#475569")
    axis.set_title(direction, fontsize=10, loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False, labelsize=8)
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
            case ["table", _, *_]:
                sys.stdout.write(table(map(Path, arguments[1:])) + "\n")
            case _:
                raise ArgumentError("use: picture RESULTS.csv PICTURE.svg, or: table FILE.csv...")
    except (HeadwayError, ImportError) as error:
        sys.stderr.write(f"headway_lab.bench.figures: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
