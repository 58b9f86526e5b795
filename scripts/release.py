"""Make a version ready to be released: `python scripts/release.py 0.2.0`.

Checks what a release needs, and dates the entry of CHANGELOG.md: what stands under "Unreleased" is
that version's from now on. `.github/workflows/release.yml` runs it, commits and tags.
"""

import re
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNRELEASED = "## Unreleased\n"


def dated(changelog: str, version: str, date: str) -> str:
    """Return the changelog with its unreleased entry dated, and an empty one above. Raises
    ValueError if there is nothing to release, or that version was."""
    if f"## {version} (2" in changelog:
        raise ValueError(f"CHANGELOG.md has {version} already")
    before, heading, rest = changelog.partition(UNRELEASED)
    if not heading or not re.match(r"\s*(#{3,}|-|[A-Za-z])", rest):
        raise ValueError("CHANGELOG.md has nothing under Unreleased")
    return f"{before}{UNRELEASED}\n## {version} ({date})\n{rest}"


def missing(version: str) -> list[str]:
    """Return what a release of this version still needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = (ROOT / "src" / "headway" / "__init__.py").read_text(encoding="utf-8")
    needs = []
    if f'__version__ = "{version}"' not in source:
        needs.append(f'__version__ = "{version}" in src/headway/__init__.py')
    if not project.get("urls", {}).get("Source"):
        needs.append("`Source` in [project.urls] of pyproject.toml")
    return needs


def main(version: str) -> None:
    """Date the entry of a version, or exit with what it lacks."""
    if needs := missing(version):
        sys.exit(f"not ready to release {version}: it needs {', and '.join(needs)}")
    path = ROOT / "CHANGELOG.md"
    today = datetime.now(UTC).date().isoformat()
    path.write_text(dated(path.read_text(encoding="utf-8"), version, today), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
