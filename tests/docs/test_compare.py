"""Comparisons with other libraries name versions and dates, in every column and row."""

import re

import pytest

import draw

VERSION = re.compile(r"\b\d+\.\d+(\.\d+\w*)?\b")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def tables(page: str) -> list[list[list[str]]]:
    return [rows(part) for part in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]


@pytest.fixture(scope="module")
def compared() -> list[list[list[str]]]:
    return tables((draw.DOCS / "compare.md").read_text(encoding="utf-8"))


def test_every_library_has_a_version_and_a_date(compared):
    header, _, *libraries = compared[0]
    assert header == ["Library", "Version", "Date", "Where the facts are from"]
    for name, version, date, source in libraries:
        assert VERSION.search(version), name
        assert DATE.fullmatch(date), name
        assert source, name


def test_every_column_is_a_library_of_the_first_table_and_every_cell_says_something(compared):
    names = {name for name, *_ in compared[0][2:]} | {"Headway"}
    for header, _, *features in compared[1:]:
        short = {
            name.replace('`BACKEND="FLASH"`', "FLASH").replace(" backend", "") for name in names
        }
        assert set(header[1:]) <= short
        assert all(len(row) == len(header) and all(row) for row in features)


def test_the_readme_names_a_version_wherever_it_compares():
    readme = (draw.DOCS.parent / "README.md").read_text(encoding="utf-8")
    (why,) = (table for table in tables(readme) if table[0][0].startswith("Why not"))
    for peer, _ in why[2:]:
        assert VERSION.search(peer), peer
