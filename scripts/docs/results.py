"""The committed results of `headway bench`, wherever under bench/results they lie.

Results are found by what their rows say (card, case, date), not by the names of files. Numbers of
one case are always taken from one run: contestants are compared only where they took turns in it.
"""

import csv
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, str]
NAMES = {
    "headway": "Headway",
    "flex": "FlexAttention",
    "cudnn": "cuDNN",
    "flash-attention-4": "FlashAttention-4",
    "sdpa": "PyTorch's SDPA",
    "create_block_mask": "create_block_mask",
}


@cache
def rows() -> tuple[Row, ...]:
    """Every row of every table of results, the latest run first."""
    found: list[Row] = []
    for path in sorted((ROOT / "bench" / "results").rglob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            found += (row for row in csv.DictReader(file) if "case" in row)
    return tuple(sorted(found, key=lambda row: row.get("date", ""), reverse=True))


def case(name: str, direction: str, device: str, measure: str = "time") -> dict[str, Row]:
    """The latest run's rows of a case on a device whose name contains `device`, by contestant."""
    found: dict[str, Row] = {}
    run = None  # the commit and the day; rows of one run differ by seconds in their date
    for row in rows():
        if (row["case"], row["direction"], row["measure"]) != (name, direction, measure):
            continue
        if device not in row["device"] or row["contestant"] in found:
            continue
        this = row["commit"], row["date"][:10]
        if run is None:
            run = this
        if this == run:
            found[row["contestant"]] = row
    return found


def speed_line(name: str, device: str = "H100") -> str:
    """A sentence on a case for a page, or nothing where it was not timed."""
    words = []
    for direction in ("forward", "backward"):
        found = case(name, direction, device)
        if "headway" not in found:
            continue
        others = [
            f"{NAMES[who]} {_ms(found[who])}"
            for who in ("flex", "cudnn", "flash-attention-4")
            if who in found
        ]
        beside = f" ({', '.join(others)})" if others else ""
        words.append(f"{direction} {_ms(found['headway'])}{beside}")
    if not words:
        return ""
    row = case(name, "forward", device)["headway"]
    sizes = f"{row['b']} × {row['hq']} heads × {int(row['length']):,} × {row['d']}"
    what = ", ".join(f"`{row[key]}`" for key in ("score", "mask") if row[key])
    return f"{device}, {sizes}, {row['dtype']}, {what}: " + "; ".join(words) + "."


def _ms(row: Row) -> str:
    assert row["unit"] == "ms", row
    return f"{float(row['median']):.2f} ms"
