"""What the site does beyond MkDocs: folders in the navigation, links that leave docs/, papers."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOT_ON_THE_SITE = ROOT / "docs" / "lab"


def on_config(config: Any) -> Any:
    """Put the pages of a folder where the navigation names it: `Recipes: recipes/`, or without a
    title among others. A folder that is not there is left out."""
    config.nav = _with_folders(config.nav, Path(config.docs_dir))
    return config


def _with_folders(nav: list[Any], docs: Path) -> list[Any]:
    found = []
    for entry in nav:
        title, at = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        if isinstance(at, list):
            found.append({title: _with_folders(at, docs)})
        elif not at.endswith("/"):
            found.append(entry)
        elif pages := sorted(
            (docs / at).glob("*.md"), key=lambda p: (p.name != "index.md", p.name)
        ):
            names = [page.relative_to(docs).as_posix() for page in pages]
            found += [{title: names}] if title else names
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links to files of the repository that are not on the site lead to its address on the network,
    if pyproject.toml names one; else only their words stay."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    source = urls.get("Source", "").rstrip("/")

    def link(found: re.Match[str]) -> str:
        words, to = found.groups()
        path = (folder / to.partition("#")[0]).resolve()
        if to.startswith(("#", "http:", "https:")) or not path.exists():
            return found[0]
        on_site = path.is_relative_to(config.docs_dir) and not path.is_relative_to(NOT_ON_THE_SITE)
        if on_site or not path.is_relative_to(ROOT):
            return found[0]
        kind = "tree" if path.is_dir() else "blob"
        at = path.relative_to(ROOT).as_posix()
        return f"[{words}]({source}/{kind}/main/{at})" if source else words

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\(([^)\s]+)\)", link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The number of a paper leads to it."""
    paper = r"\barXiv (\d{4}\.\d{5})\b"
    return re.sub(paper, r'<a href="https://arxiv.org/abs/\1">arXiv \1</a>', html)
