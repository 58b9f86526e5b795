"""What can be told of the pages without building the site: their links, pictures and places in the
navigation. (Their code is run by tests/test_pages.py.)"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import hooks

ROOT = hooks.ROOT
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md")])
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])+\]\(([^)\s]+)\)")


def words(page: Path) -> str:
    """A page without its code."""
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link may name: its headings, as the site and GitHub spell them, and the names of the
    reference."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    found, seen = set(), {}
    for heading in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        heading, _, own = heading.partition(" { #")
        found.add(own.removesuffix(" }"))
        heading = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", heading).strip().lower()
        slug = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading))
        seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}_{seen[slug]}" if seen[slug] else slug)
    return found | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    for link in LINK.findall(words(page)):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.is_relative_to(ROOT), link
        assert to.exists(), link
        if anchor and to.suffix == ".md":
            assert anchor in anchors(to), f"{link}: there are {sorted(anchors(to))}"


class Loader(yaml.SafeLoader):
    """Of mkdocs.yml, less what it names of Python."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def leaves(nav: list[Any]) -> list[str]:
    found = []
    for entry in nav:
        at = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += leaves(at) if isinstance(at, list) else [at]
    return found


def test_every_page_has_one_place_in_the_navigation():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = leaves(hooks._with_folders(config["nav"], DOCS))
    pages = [page for page in DOCS.rglob("*.md") if page.parent != hooks.NOT_ON_THE_SITE]
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in pages)
    assert listed[0] == "index.md"
    for path in config["hooks"] + [f"docs/{name}" for name in config["extra_css"]]:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", ["recipes", "reference"])
def test_every_page_is_on_the_list_of_its_folder(name):
    folder = DOCS / name
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (folder / "index.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(p.name for p in folder.glob("*.md") if p.name != "index.md")


def test_links_out_of_docs_keep_their_words_until_there_is_an_address(monkeypatch):
    """On the site: in the source tree they lead to the file."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    config = SimpleNamespace(docs_dir=str(DOCS))
    text = "[the contract](../DESIGN.md) and [masks](gallery.md#masks)"
    for urls, link in (
        ({}, "the contract"),
        ({"Source": "https://h.org/it"}, "[the contract](https://h.org/it/blob/main/DESIGN.md)"),
    ):
        monkeypatch.setattr(hooks.tomllib, "loads", lambda _, u=urls: {"project": {"urls": u}})
        written = hooks.on_page_markdown(text, page, config)
        assert written == f"{link} and [masks](gallery.md#masks)"
