"""The site builds, its links lead somewhere, and a page asks no network for anything."""

import html
import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

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


# What readers ask, the words that they click on the home page, and the heading that answers; with
# no heading, the first lines of the page do.
QUESTIONS = {
    # A researcher with FlexAttention code:
    "what is different from FlexAttention": ("Headway or …?", "Where the others are better"),
    "how do I port my code": ("Migrate: SDPA, FlexAttention, flash-attn", "From FlexAttention"),
    "packed documents": ("Packed documents (varlen)", ""),
    "train a bias": ("Biases (ALiBi, T5, learned)", ""),
    "why is my mask slow": ("Performance", "Why is my mask slow? Read explain"),
    "a list of masks": ("Gallery of masks and scores", "Masks"),
    "select blocks of keys": ("Block-sparse, NSA, MoBA", ""),
    "my mask does the opposite": ("Limits and questions", "My mask does the opposite"),
    "torch.compile": ("Limits and questions", "Does it work with torch.compile"),
    "the same bits twice": ("Numerics and determinism", "Determinism"),
    # An engineer who must choose:
    "over 8 GPUs": ("Context parallel", ""),
    "how fast is it": ("Performance", "What was measured"),
    "or FlashAttention-4": ("Headway or …?", "Libraries with programmable scores or masks"),
    "serve it": ("Serving: KV cache and pages", "KV cache: decode a token at a time"),
    "pages": ("Serving: KV cache and pages", "Many requests in pages"),
    "my Hugging Face model": ("Hugging Face transformers", ""),
    "FSDP": ("FSDP2 and checkpoints", ""),
    "what is missing": ("Limits and questions", "What it does not do"),
    "compile time": ("Performance", "The first call, and what is cached"),
    "an image for my cluster": ("Clusters and containers", "In a container's image"),
    # A student:
    "install": ("Install", "Install"),
    "what is a score": ("Concepts", "Scores"),
    "run it in a notebook": ("A notebook", ""),
    "my first model": ("nanoGPT", ""),
    "(batch, length, heads, width)": (
        "Limits and questions", "My tensors are (batch, length, heads, width)",
    ),
    "see the weights": ("Limits and questions", "I want to look at the weights"),
    "sliding window": ("Sliding windows and sinks", ""),
    "logits explode": ("Stable training", "QK-Clip"),
    "without a GPU": ("Performance", "On a CPU"),
    "what does this error mean": ("Errors", ""),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_two_clicks_away(site: Path, question: str):
    """One on the home page, in its menu or its text, and one to the heading."""
    label, heading = QUESTIONS[question]
    home = (site / "index.html").read_text(encoding="utf-8")
    links = {
        " ".join(re.sub("<[^>]+>", " ", words).split()): to
        for to, words in re.findall(r'<a\b[^>]*href="?([^" >]+)"?[^>]*>(.*?)</a>', home, re.DOTALL)
    }
    assert label in links
    page = site / links[label].partition("#")[0]
    assert page.suffix == ".ipynb" or (page if page.name else site / "index.html").exists()
    if heading:
        text = (page if page.is_file() else site / "index.html").read_text(encoding="utf-8")
        titles = [
            html.unescape(re.sub("<[^>]+>", "", title))
            for title in re.findall(r"<h[23][^>]*>(.*?)</h[23]>", text, re.DOTALL)
        ]
        assert any(title.startswith(heading) for title in titles), titles


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FIRST = {
    "varlen": "recipes/packing.html",
    "KV cache": "recipes/serving.html",
    "context parallel": "recipes/context-parallel.html",
    "attention sink": "recipes/sliding-window.html",
}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("opened", ["?q=varlen", "typed"])
def test_search_starts_in_a_page_opened_as_a_file(site: Path, tmp_path: Path, opened: str):
    """By its address, and by words typed after a click. (Without a focus, as typed by a script, the
    theme does not load the index of a page that was opened as a file.)"""
    page = site / "index.html"
    if opened == "typed":
        page = site / "typed.html"
        script = (
            "setTimeout(() => {let q = document.querySelector('[data-md-component=search-query]');"
            "q.focus(); q.value = 'varlen'; q.dispatchEvent(new Event('input', {bubbles: true}));"
            "q.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))}, 1500)"
        )
        text = (site / "index.html").read_text(encoding="utf-8")
        page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    query = opened if opened.startswith("?") else ""
    assert found_pages(page.as_uri() + query, tmp_path)[0] == FIRST["varlen"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("typed", list(FIRST)[1:])
def test_the_first_page_found(site: Path, tmp_path: Path, typed: str):
    address = f"{(site / 'index.html').as_uri()}?q={quote(typed)}"
    assert found_pages(address, tmp_path)[0] == FIRST[typed]


def found_pages(address: str, profile: Path) -> list[str]:
    """Return the pages that the search of a page lists, best first, in a headless browser."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
        "--virtual-time-budget=10000", "--dump-dom", address,
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    links = re.findall(r'href="([^"]*)" class="md-search-result__link', dom)
    site = address.rpartition("/")[0] + "/"
    return [re.sub(r"[?#].*", "", link).removeprefix(site) for link in links]
