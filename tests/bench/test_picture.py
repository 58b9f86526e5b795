"""The picture of speeds: its numbers are those of the file of results."""

import re
from pathlib import Path

import pytest

from headway.errors import ArgumentError
from headway_lab.bench.figures import BARS, draw, read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "h200" / "bench-rows-2026-11-28.csv"


def shown(picture: Path) -> list[str]:
    """The labels of bars: whole numbers above the size of a tick, which are hundreds."""
    numbers = re.findall(r">(\d+)</text>", picture.read_text(encoding="utf-8"))
    return sorted(n for n in numbers if int(n) % 100)


def test_the_picture_of_the_readme_shows_the_results_that_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(RESULTS, tmp_path / "new.svg")
    device, speeds = read(RESULTS)
    kept = ROOT / "docs" / "pictures" / "speed.svg"
    expected = sorted(f"{speed:.0f}" for speed in speeds.values() if round(speed) % 100)
    assert shown(kept) == shown(tmp_path / "new.svg") == expected
    assert device in kept.read_text(encoding="utf-8")
    assert {case for case, _, _ in speeds} == set(BARS)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ArgumentError, match=r"other\.csv is not a file of `headway bench`"):
        read(other)
    header = RESULTS.read_text(encoding="utf-8").splitlines()[0]
    lines = [x for x in RESULTS.read_text(encoding="utf-8").splitlines() if "curve-1k" in x]
    other.write_text("\n".join([header, *lines]))
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError, match="has none of the cases rows-8k-128-causal"):
        draw(other, tmp_path / "none.svg")
