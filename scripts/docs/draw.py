"""Write the pictures of docs/, the page of the gallery and the README's notebook: `python scripts/docs/draw.py`.

All of it is committed; tests/docs/test_drawn.py fails where something was not drawn again.
"""

import re
from functools import cache
from pathlib import Path

import concepts
import gallery
import notebook
import rotary
import speed
import training

DOCS = Path(__file__).resolve().parents[2] / "docs"


@cache
def drawn() -> dict[str, str]:
    """Every file that is written here, by its path in docs/."""
    entries = {
        f"pictures/{entry.key}.svg": gallery.picture(entry)
        for entry in gallery.MASKS + gallery.SCORES
        if not entry.plain
    }
    pages = {
        "gallery.md": gallery.page(),
        "performance.md": filled("performance.md", speed.said()),
        "training.md": filled("training.md", training.said()),
        "readme.ipynb": notebook.text(),
    }
    plots = speed.pictures() | training.pictures()
    return entries | concepts.pictures() | rotary.pictures() | plots | pages


def filled(page: str, said: dict[str, str]) -> str:
    """A page of docs/ with what lies between its marks as the results have it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, words in said.items():
        marks = re.compile(rf"(<!-- drawn: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert marks.search(text), f"docs/{page} has no place for {name}"
        text = marks.sub(lambda m, words=words: f"{m[1]}{words}\n{m[2]}", text)
    return text


def main() -> None:
    for name, text in drawn().items():
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
