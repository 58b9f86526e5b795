"""The site builds, its links lead somewhere, and a page asks no network for anything."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if find_spec("mkdocs") is None or find_spec("material") is None:
        pytest.skip("mkdocs is not installed: the extra `docs`, which `make setup` installs")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site: Path):
    pages = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    built = [p for p in pages if (site / p.with_suffix(".html")).exists()]
    assert built == [p for p in pages if p.parts[0] != "lab"]


def test_nothing_is_fetched_from_elsewhere(site: Path):
    """Links may lead away; what a browser fetches by itself may not."""
    fetched = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|"
        r"<link\b(?![^>]*canonical)[^>]*\bhref=\"?(?:https?:)?//"
    )
    style = re.compile(r"(?:url\(|@import )[\"']?(?:https?:)?//")
    for path in site.rglob("*.html"):
        assert not fetched.search(path.read_text(encoding="utf-8")), path
    for path in site.rglob("*.css"):
        assert not style.search(path.read_text(encoding="utf-8")), path


def test_search_has_its_index_for_files(site: Path):
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    assert "Sliding window" in index
    assert "lab/" not in re.findall(r'"location": ?"([a-z-]*/?)', index)


# What people type, and the page that must hold all of its words.
SYNONYMS = {
    "varlen": "recipes/packing.html", "cu_seqlens": "recipes/packing.html",
    "THD": "recipes/packing.html", "ragged": "recipes/packing.html",
    "jagged": "recipes/packing.html", "packed documents": "recipes/packing.html",
    "KV cache": "recipes/serving.html", "paged attention": "recipes/serving.html",
    "context parallel": "recipes/context-parallel.html", "CP": "recipes/context-parallel.html",
    "ring attention": "recipes/context-parallel.html",
    "Ulysses": "recipes/context-parallel.html",
    "attention sink": "recipes/sliding-window.html", "NSA": "recipes/top-k-blocks.html",
    "MoBA": "recipes/top-k-blocks.html", "M-RoPE": "recipes/positions.html",
    "attn_mask": "migration.html", "padding mask": "recipes/packing.html",
    "why is my mask slow": "performance.html", "FlexAttention": "compare.html",
}  # fmt: skip


@pytest.mark.parametrize("typed", SYNONYMS)
def test_the_page_has_the_words_that_people_type(site: Path, typed: str):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    page = " ".join(
        f"{entry['title']} {entry['text']}"
        for entry in index["docs"]
        if entry["location"].partition("#")[0] == SYNONYMS[typed]
    )
    words = set(re.findall(r"[\w-]+", re.sub("<[^>]+>", " ", page).lower()))
    assert set(typed.lower().split()) <= words
