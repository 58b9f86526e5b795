"""The package's long description: the README, for a page outside of the repository.

A hook of the build (pyproject.toml). Links and the picture lead to the files at `Source` in
[project.urls]. As long as there is none, only the words of links stay, and no picture with its caption.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parents[1]


def outside(readme: str, source: str) -> str:
    """Return the README with absolute links."""
    source = source.rstrip("/")
    if not source:
        readme = re.sub(r"^!\[.*\)\n\n(?:.+\n)+\n", "", readme, flags=re.MULTILINE)

    def link(match: re.Match[str]) -> str:
        picture, words, to = match.groups()
        if not source:
            return words
        kind = "raw" if picture else "tree" if (ROOT / to).is_dir() else "blob"
        return f"{picture}[{words}]({source}/{kind}/main/{to})"

    return re.sub(r"(!?)\[([^\]\n]+)\]\((?!https:|#)([^)\s]+)\)", link, readme)


class LongDescription(MetadataHookInterface):
    """Set the long description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        source = metadata.get("urls", {}).get("Source", "")
        text = outside((ROOT / "README.md").read_text(encoding="utf-8"), source)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
