"""The table of speeds on a page, from the CSVs of `headway bench`:

    python -m headway_lab.bench.table FILE.csv...

Of a case that is in several files the first one counts.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from headway.errors import ArgumentError, HeadwayError

from .case import BACKWARD, FORWARD
from .results import speeds_in

# The cases that a page shows, in its order and words.
CASES = {
    "8k-128-causal": "8k, 128 wide, causal",
    "8k-128-full": "8k, 128 wide, full",
    "8k-64-causal": "8k, 64 wide, causal",
    "8k-64-full": "8k, 64 wide, full",
    "softcap-causal": "8k, causal with a softcap",
    "alibi-causal": "8k, causal with ALiBi",
    "user-causal": "8k, causal with `1.1 * score + 0.01 * (kv_idx - q_idx) + 0.5`",
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
    "headway": "Headway",
    "flex": "FlexAttention",
    "cudnn": "cuDNN",
    "flash-attention-4": "FlashAttention-4",
}
FASTER = 1.02  # bold where another has this many times the speed: less may be noise

ByCase = dict[str, dict[tuple[str, str], float]]  # by case, contestant and direction


def speeds(paths: Iterable[Path]) -> ByCase:
    """TFLOP/s of kept pairs of each case, from the first file that has it."""
    found: ByCase = {}
    for path in paths:
        before = set(found)
        for (case, direction, contestant), speed in speeds_in(path)[1].items():
            if case not in before:
                found.setdefault(case, {})[contestant, direction] = speed
    return found


def table(paths: Iterable[Path]) -> str:
    """Markdown, forward / backward in each cell; **bold** where another is faster."""
    found = speeds(paths)
    cases = [name for name in CASES if name in found]
    if not cases:
        raise ArgumentError(f"no speed of a case that the table shows: {', '.join(CASES)}")
    rows = [["", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    rows += [[CASES[name], *(_cell(found[name], who) for who in COLUMNS)] for name in cases]
    return "\n".join(
        "|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in rows
    )


def _cell(case: dict[tuple[str, str], float], who: str) -> str:
    """ "709 / 671", or "" for who was not timed."""
    both = []
    for direction in (FORWARD, BACKWARD):
        speed, ours = case.get((who, direction)), case["headway", direction]
        if speed is None:
            return ""
        both.append(f"**{speed:.0f}**" if speed > FASTER * ours else f"{speed:.0f}")
    return " / ".join(both)


def main(arguments: list[str]) -> int:
    """Print the table of these files; 0, or 2 for a mistake that the message explains."""
    try:
        if not arguments:
            raise ArgumentError("name the CSVs: python -m headway_lab.bench.table FILE.csv...")
        sys.stdout.write(table(map(Path, arguments)) + "\n")
    except HeadwayError as error:
        sys.stderr.write(f"headway_lab.bench.table: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
