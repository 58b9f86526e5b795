"""The table of speeds: that of docs/performance.md is what the command in its comment writes."""

import re
import shlex
from pathlib import Path

import pytest

from headway.errors import ArgumentError
from headway_lab.bench.figures import ROWS, main, table
from headway_lab.bench.figures import __name__ as module

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
SPEEDS = re.compile(r"<!-- speeds: (.*?) -->\n(.*?)\n<!-- end of speeds -->", re.DOTALL)


def write(path: Path, *rows: tuple[str, str, str, str]) -> Path:
    lines = ["case,contestant,direction,gflops", *(",".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.skipif(not (ROOT / "bench").is_dir(), reason="a source archive has no results")
def test_the_page_shows_what_the_command_writes(monkeypatch, capsys):
    found = SPEEDS.search(PAGE.read_text(encoding="utf-8"))
    assert found, f"{PAGE.name} has no table of speeds between its comments"
    command = shlex.split(found[1])
    assert command[:4] == ["python", "-m", module, "table"]
    monkeypatch.chdir(ROOT)
    assert main(command[3:]) == 0
    assert capsys.readouterr().out.rstrip("\n") == found[2], (
        f"{PAGE.name} is stale; run: {found[1]}"
    )


def test_first_file_counts_and_what_is_faster_is_bold(tmp_path):
    case, other = list(ROWS)[:2]
    first = write(
        tmp_path / "first.csv",
        (case, "headway", "forward", "700000.4"), (case, "headway", "backward", "500000"),
        (case, "cudnn", "forward", "713000"), (case, "cudnn", "backward", "511000"),
        (case, "flex", "forward", "400000"), (case, "flex", "backward", ""),
        ("of no page", "headway", "forward", "1"),
    )  # fmt: skip
    second = write(
        tmp_path / "second.csv",
        (case, "headway", "forward", "1"), (case, "headway", "backward", "1"),
        (other, "headway", "forward", "2000"), (other, "headway", "backward", "3000"),
    )  # fmt: skip
    assert table([first, second]).splitlines()[2:] == [
        f"| {ROWS[case]} | 700 / 500 | | 713 / **511** | |",
        f"| {ROWS[other]} | 2 / 3 | | | |",
    ]


def test_files_without_a_case_are_refused(tmp_path, capsys):
    empty = write(tmp_path / "empty.csv", ("of no page", "headway", "forward", "1"))
    with pytest.raises(ArgumentError, match=r"no speed of a case.*8k-128-causal"):
        table([empty])
    assert main(["table", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: No such file" in capsys.readouterr().err
    assert main(["table"]) == 2
    assert "FILE.csv" in capsys.readouterr().err
