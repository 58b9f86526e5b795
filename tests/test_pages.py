"""Every ```python block of README.md and docs/ runs, in order, one namespace per file.

A block may use the names of the blocks above it. Each block is a test: run alone, or in another
process than the blocks above it, it runs those first.
"""

import re
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(eq=False)
class Page:
    """A Markdown file: its blocks as (line of the fence, code), and how far it has been run."""

    path: Path
    blocks: list[tuple[int, str]] = field(init=False)
    module: ModuleType = field(init=False)
    done: int = 0
    last: ClassVar["Page | None"] = None  # the page whose block ran last

    def __post_init__(self) -> None:
        text = self.path.read_text(encoding="utf-8")
        self.blocks = [(text.count("\n", 0, m.start()) + 1, m[1]) for m in FENCE.finditer(text)]
        self.restart()

    def restart(self) -> None:
        self.module = ModuleType("page_" + re.sub(r"\W", "_", self.name))
        self.done = 0

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    def run_to(self, last: int) -> None:
        """Run the blocks up to and including block `last`, those that have run already excepted."""
        # Another process may have the rest of a page that started a process group.
        if Page.last not in (None, self) and dist.is_initialized():
            dist.destroy_process_group()
            Page.last.restart()
        Page.last = self
        sys.modules[self.module.__name__] = self.module  # where dataclass and pickle look
        while self.done <= last:
            line, code = self.blocks[self.done]
            # Blank lines above it: tracebacks and source look-ups then give the page's own lines.
            exec(compile("\n" * line + code, str(self.path), "exec"), self.module.__dict__)
            self.done += 1


COMPILE = ("docs/recipes/clusters.md",)  # GPU kernels, for which it needs no GPU
PAGES = [Page(path) for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]]
BLOCKS = [
    pytest.param(page, i, id=f"{page.name}:{line}")
    for page in PAGES
    for i, (line, _) in enumerate(page.blocks)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An empty folder for each page, shared by its blocks: one may read what another wrote."""
    return {page.name: tmp_path_factory.mktemp("page") for page in PAGES}


@pytest.mark.parametrize(("page", "i"), BLOCKS)
def test_block(page: Page, i: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    if page.name in COMPILE and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    monkeypatch.chdir(folders[page.name])
    page.run_to(i)


def test_readme_has_blocks():
    assert PAGES[0].blocks, "README.md shows no Python"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_is_missed(page: Page):
    opened = page.path.read_text(encoding="utf-8").count("```py")
    assert opened == len(page.blocks), "a Python block that is not opened by ```python alone"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_to_paste_fits_80_columns(page: Page):
    if {"lab", "internals"} & set(page.path.parts):
        pytest.skip("a page about the project, not code to paste")
    text = page.path.read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```\w+\n(.*?)^\1```$", text, re.M | re.S)
    wide = [line for indent, code in blocks for line in code.splitlines()
            if len(line.removeprefix(indent)) > 80]  # fmt: skip
    assert not wide


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/recipes").glob("[!i]*.md")), ids=lambda p: p.stem
)
def test_a_recipe_opens_with_code_to_paste(path: Path):
    """At most eight lines of at most 80 columns."""
    first = re.search(r"^```\w+\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)
    lines = first[1].splitlines()
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 80
