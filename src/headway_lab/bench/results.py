"""What one measurement is, and the CSV that keeps it."""

import csv
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TextIO

from headway.errors import ArgumentError

from .case import Case
from .machine import Machine
from .timing import Timing

PASS, FAIL, WRONG, NOT_RUN = "pass", "fail", "wrong", "not run"


@dataclass(frozen=True)
class Result:
    """One contestant in one direction of one case. What does not apply is None or ""."""

    case: str
    direction: str
    contestant: str
    unit: str = "ms"  # of median, low and high
    median: float | None = None
    low: float | None = None  # quartiles
    high: float | None = None
    runs: int = 0
    gflops: float | None = None  # products of kept pairs only
    roof: float | None = None  # GFLOP/s of a matrix product, in this dtype or float32
    pairs: int | None = None  # that the mask keeps, over batches and heads
    tiles: int | None = None  # live, of 128 x 128
    error: float | None = None  # of the worst output; see check.py
    limit: float | None = None
    ratio: float | None = None  # this contestant's time over Headway's: above 1, Headway is faster
    target: str = ""
    verdict: str = ""
    note: str = ""

    def timed(self, timing: Timing, unit: str = "ms") -> "Result":
        """With the numbers of a timing: seconds, or for "%" a share."""
        factor = {"ms": 1e3, "µs": 1e6, "%": 1e2}[unit]
        median, low, high = (round(factor * t, 5) for t in timing[:3])
        return replace(self, unit=unit, median=median, low=low, high=high, runs=timing.runs)

    def asked(self, target: str, passed: bool) -> "Result":
        """With a target and whether it was reached."""
        return replace(self, target=target, verdict=PASS if passed else FAIL)


def describe(case: Case) -> dict[str, object]:
    """The columns that say what a case is."""
    shape = {
        name: getattr(case, name)
        for name in ("b", "hq", "hk", "length", "d", "dtype", "std", "stats")
    } | {"dv": case.widths[1]}
    mods = {"score": case.score, "mask": case.mask}
    return shape | {name: "" if make is None else _name(make()) for name, make in mods.items()}


def _name(mod: Callable) -> str:
    """A value of the library as it prints; a function by its name."""
    return getattr(mod, "__qualname__", None) or str(mod)


# TFLOP/s of kept pairs, by case, direction and contestant.
Speeds = dict[tuple[str, str, str], float]


def speeds_in(path: Path) -> tuple[str, Speeds]:
    """The device of a file of results, and all speeds in it. Raises ArgumentError."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return rows[0].get("device", ""), {
            (row["case"], row["direction"], row["contestant"]): float(row["gflops"]) / 1e3
            for row in rows
            if row["gflops"]
        }
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}") from error
    except (KeyError, ValueError, IndexError) as error:
        raise ArgumentError(f"{path} is not a file of `headway bench`: {error!r}") from error


class Book:
    """A CSV file that gets every line as soon as it is known: what was measured is never lost.

    With None for a path nothing is kept.
    """

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path, self.resume = path, resume
        self.file: TextIO | None = None
        self.done: frozenset[str] = frozenset()

    def __enter__(self) -> "Book":
        if self.path is None:
            return self
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            resumed = self.resume and self.path.exists()
            if resumed:
                with open(self.path, newline="", encoding="utf-8") as file:
                    self.done = frozenset(row["case"] for row in csv.DictReader(file))
            mode = "a" if resumed else "x"
            self.file = open(self.path, mode, newline="", encoding="utf-8")
        except FileExistsError:
            raise ArgumentError(
                f"--output {self.path} exists; move it, give another name, or add --resume"
            ) from None
        except OSError as error:
            raise ArgumentError(f"--output {self.path}: {error.strerror}") from error
        columns = [f.name for f in fields(Machine)] + ["load", "case", "measure"]
        columns += list(describe(Case("")))
        columns += [f.name for f in fields(Result) if f.name != "case"]
        self.writer = csv.DictWriter(self.file, columns, lineterminator="\n")
        if not resumed:
            self.writer.writeheader()
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, machine: Machine, load: float, case: Case, results: Iterable[Result]) -> None:
        """The lines of one case."""
        if self.file is None:
            return
        common = asdict(machine) | {"load": round(load, 2), "measure": case.measure}
        for result in results:
            self.writer.writerow(common | describe(case) | asdict(result))
        self.file.flush()
