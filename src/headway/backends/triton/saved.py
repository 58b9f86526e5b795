"""Tile sizes that `headway tune` found: JSON files, which take precedence over the table in
config.py.

- The user's cache folder has one per GPU model. Deleting it is always safe.
- `tiles/` in this package has one per architecture, such as sm_80.json: a file that an owner of
  such a GPU sent, renamed. There is none yet (`measured_on`).

A file is read once per process. The user's goes before the architecture's.
"""

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import astuple
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import ArgumentError
from .config import MEASURED_ON, Tiling

TunedTilings = dict[str, Tiling]  # by `saved_key`
SHIPPED = Path(__file__).parent / "tiles"


class Winner(NamedTuple):
    """The fastest tile sizes of a kernel, with their milliseconds and those of the sizes used
    until now."""

    tiling: Tiling
    ms: float
    earlier_ms: float


def folder() -> Path:
    """Return the folder of the user's files, in the cache folder (on Linux, like Triton)."""
    cache = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return Path(cache).expanduser() / "headway" / "tiles"


def card(device: torch.device) -> str:
    """Return the name of a GPU, as a file name."""
    name = torch.cuda.get_device_name(device)
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


def architecture(device: torch.device) -> str:
    """Return the architecture of a GPU: "sm_80", "gfx942"."""
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def measured_on(device: torch.device) -> str:
    """Return where the tile sizes used on a GPU were measured, and what to do if elsewhere."""
    name, target = card(device), architecture(device)
    if load(name):
        return f"found by headway tune on this model ({folder() / name}.json)"
    shipped = SHIPPED / f"{target}.json"
    if shipped.exists():
        return f"found by headway tune on {_read(shipped)['card']}"
    if target in MEASURED_ON:
        return f"measured on {MEASURED_ON[target]}"
    others = " and ".join(f"{cards} ({name})" for name, cards in MEASURED_ON.items())
    return (
        f"not measured on this card; they are those of {others}. `headway tune` searches for "
        "better ones in ten minutes, and writes a file that you can send to the project"
    )


def for_device(device: torch.device) -> TunedTilings:
    """Return the tile sizes found for a GPU, the user's before the architecture's."""
    return load(architecture(device), SHIPPED) | load(card(device))


@lru_cache(maxsize=64)
def load(name: str, where: Path | None = None) -> TunedTilings:
    """Return the sizes of a file of a folder, the user's by default; empty if there is none.

    **Raises:** `ArgumentError` if the file does not read as tile sizes.
    """
    path = (where or folder()) / f"{name}.json"
    try:
        return {key: _tiling(sizes) for key, sizes in _read(path)["tiles"].items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"{path} does not read as tiles ({error}); delete it, and run `headway tune` for new "
            "ones"
        ) from error


def _tiling(sizes: Any) -> Tiling:
    tiling = Tiling(*map(int, sizes))
    m, n, warps, stages, edge = astuple(tiling)
    blocks = {16, 32, 64, 128, 256}
    if not ({m, n} <= blocks and edge in {0, *blocks} and warps in {1, 2, 4, 8, 16} and stages > 0):
        raise ValueError(f"{sizes} are no sizes of a kernel")
    return tiling


def _read(path: Path) -> dict[str, Any]:
    """Return what a file holds. One of version 0.2 was its tiles, and booleans besides. A folder
    that this user may not read (a container's home) holds none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {"tiles": {}}
    if "tiles" in document:
        return document
    return {"tiles": {k: v for k, v in document.items() if not isinstance(v, bool)}}


def store(name: str, winners: Mapping[str, Winner], about: Mapping[str, str]) -> Path:
    """Add sizes to the GPU's file. Other processes may write to it at the same time.

    - `about`: what the file says of the machine (`about`).

    **Raises:** `ArgumentError` if the folder cannot be written to, or the file is not one of tiles.
    """
    import filelock  # installed with PyTorch; only `headway tune` needs it

    path = folder() / f"{name}.json"
    try:
        folder().mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").touch()
    except OSError as error:
        raise ArgumentError(
            f"cannot write to {folder()}: {error.strerror}; set XDG_CACHE_HOME to another folder"
        ) from error
    with filelock.FileLock(path.with_suffix(".lock")):
        load.cache_clear()
        load(name)  # a file that does not read as tiles is not overwritten
        document = _read(path)
        tilings = {key: astuple(winner.tiling) for key, winner in winners.items()}
        times = {key: winner[1:] for key, winner in winners.items()}
        document = {
            **about,
            "tiles": dict(sorted((document["tiles"] | tilings).items())),
            "milliseconds, now and before": dict(
                sorted((document.get("milliseconds, now and before", {}) | times).items())
            ),
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)  # a reader sees the old file or the new one
    load.cache_clear()
    return path


def about(device: torch.device) -> dict[str, str]:
    """Return what a file says of the machine: the card, versions and the day."""
    versions = {name: metadata.version(name) for name in ("torch", "triton")}
    return {
        "card": torch.cuda.get_device_name(device),
        "architecture": architecture(device),
        **versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
