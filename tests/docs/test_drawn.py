"""What scripts/docs/draw.py writes is written: pictures, the gallery, the numbers of a page."""

import draw

ROOT = draw.DOCS.parent


def test_what_is_drawn_is_current():
    old = [
        name for name, text in draw.drawn().items()
        if not (draw.DOCS / name).exists() or (draw.DOCS / name).read_text(encoding="utf-8") != text
    ]  # fmt: skip
    assert old == [], "run: make docs"


def test_no_picture_is_left_over():
    drawn = {name for name in draw.drawn() if name.startswith("pictures/")}
    pages = "".join(path.read_text(encoding="utf-8") for path in draw.DOCS.rglob("*.md"))
    pages += (ROOT / "README.md").read_text(encoding="utf-8")
    there = {f"pictures/{path.name}" for path in (draw.DOCS / "pictures").glob("*")}
    assert {name for name in there - drawn if name not in pages} == set()
    assert {name for name in drawn if name not in pages} == set()
