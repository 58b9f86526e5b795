"""The README as a notebook: its Python in cells of code, everything else in cells of text."""

import json
import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "README.md"
INSTALL = "Install Headway first: see *Install* below. Then run all cells.\n"
PICTURE = re.compile(r"^!\[.*\)\n\n(?:.+\n)+\n", re.MULTILINE)  # with its caption
LINK = re.compile(r"\[([^\]\n]+)\]\((?!https:)[^)]+\)")  # into the repository


def text() -> str:
    """Return the notebook, as nbformat 4.5 writes it."""
    readme = LINK.sub(r"\1", PICTURE.sub("", README.read_text(encoding="utf-8")))
    title, rest = readme.split("\n", 1)
    pieces = re.split(
        r"^```python\n(.*?)^```$\n?", f"{title}\n\n{INSTALL}{rest}", flags=re.M | re.S
    )
    cells = [
        _cell(number, "code" if number % 2 else "markdown", piece.strip("\n"))
        for number, piece in enumerate(pieces)
        if piece.strip()
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _cell(number: int, kind: str, source: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    cell["source"] = source.splitlines(keepends=True)
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})
