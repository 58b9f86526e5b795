"""A picture of a file of results: `python -m headway_lab.bench.picture RESULTS.csv PICTURE.svg`.

Bars of TFLOP/s over kept pairs, forward and backward, as the file has them: nothing is measured
here, and no number is written by hand. It is the picture of the README.
"""

import sys
from pathlib import Path

from headway.errors import ArgumentError

from .case import BACKWARD, FORWARD
from .results import Speeds, speeds_in

# What is shown: of calls at full size, those that differ in what they compute.
CASES = {
    "8k-128-causal": "causal",
    "user-causal": "causal, the user's score:\n1.1 s + 0.01 (j − i) + 0.5",
    "alibi-causal": "causal, ALiBi",
    "softcap-causal": "causal, softcap",
    "relative-bias-learned-causal": "causal, learned relative bias",
    "window-1024": "sliding window of 1024",
    "documents-causal": "causal, twelve documents",
    "8k-192-128-causal": "causal, MLA (192 and 128)",
}
CONTESTANTS = {
    "headway": ("Headway", "#c2410c"),
    "flex": ("FlexAttention", "#64748b"),
    "flash-attention-4": ("FlashAttention-4", "#b6c2d2"),
}


def read(path: Path) -> tuple[str, Speeds]:
    """The device of a file of results, and the speeds that are shown. Raises ArgumentError."""
    device, speeds = speeds_in(path)
    return device, {
        key: speed for key, speed in speeds.items() if key[0] in CASES and key[2] in CONTESTANTS
    }


def draw(results: Path, picture: Path) -> None:
    """Write the picture; a case that the file lacks is left out.

    **Raises:** `ArgumentError` where there is nothing to show, `ImportError` without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'headway[plot]'") from error
    device, speeds = read(results)
    cases = [case for case in CASES if any(key[0] == case for key in speeds)]
    if not cases:
        raise ArgumentError(f"{results} has none of the cases {', '.join(CASES)}")
    # Text stays text, small and sharp, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "headway"}):
        figure = Figure(figsize=(9.2, 0.9 + 0.62 * len(cases)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True, sharex=True)
        for axis, direction in zip(panels, (FORWARD, BACKWARD), strict=True):
            _bars(axis, direction, cases, speeds)
        panels[0].set_yticks(range(len(cases)), [CASES[case] for case in cases], fontsize=9)
        panels[0].invert_yaxis()
        figure.legend(
            *panels[0].get_legend_handles_labels(), loc="outside upper right",
            ncols=len(CONTESTANTS), frameon=False, fontsize=9,
        )  # fmt: skip
        figure.supxlabel(f"TFLOP/s of kept pairs, bfloat16, {device}", fontsize=9)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _bars(axis, direction: str, cases: list[str], speeds: Speeds) -> None:
    height = 0.8 / len(CONTESTANTS)
    for n, (contestant, (name, colour)) in enumerate(CONTESTANTS.items()):
        found = [
            (at + (n - 1) * height, speeds[case, direction, contestant])
            for at, case in enumerate(cases)
            if (case, direction, contestant) in speeds
        ]
        if not found:
            continue
        at, speed = zip(*found, strict=True)
        bars = axis.barh(at, speed, height * 0.92, color=colour, label=name)
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2, color="#475569")
    axis.set_title(direction, fontsize=10, loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(left=False, labelsize=8)
    axis.grid(axis="x", color="#e5e7eb", linewidth=0.6)
    axis.set_axisbelow(True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m headway_lab.bench.picture RESULTS.csv PICTURE.svg")
    try:
        draw(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ArgumentError, ImportError) as error:
        sys.exit(str(error))
