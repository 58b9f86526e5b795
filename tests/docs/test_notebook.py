"""The notebook is the README: every block of Python is a cell, and the cells run from the top."""

import json
import sys
from types import ModuleType

import draw
import notebook


def test_its_cells_are_the_blocks_of_the_readme_and_run(monkeypatch):
    book = json.loads((draw.DOCS / "readme.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    readme = notebook.README.read_text(encoding="utf-8")
    assert "".join(f"```python\n{source}\n```\n" for source in code) == "".join(
        f"```python{block.split('```')[0]}```\n" for block in readme.split("```python")[1:]
    )
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    module = ModuleType("readme_as_a_notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, source in enumerate(code):
        exec(compile(source, f"cell {number}", "exec"), vars(module))
