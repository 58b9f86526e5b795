"""Tile sizes that `headway tune` found on the user's GPU: a JSON file per GPU model.

The file is in the user's cache folder. It is read once per process and takes precedence over the
table in config.py. Deleting it is always safe.
"""

import json
import os
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path

import torch

from ...errors import ArgumentError
from .config import Tiling

TunedTilings = dict[str, Tiling]  # by `saved_key`


def folder() -> Path:
    """Return the folder of the files, in the user's cache folder (on Linux, like Triton)."""
    cache = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return Path(cache).expanduser() / "headway" / "tiles"


def card(device: torch.device) -> str:
    """Return the name of a GPU, as a file name."""
    name = torch.cuda.get_device_name(device)
    return "-".join("".join(c if c.isalnum() else " " for c in name).lower().split())


@lru_cache(maxsize=64)
def load(name: str) -> TunedTilings:
    """Return the sizes found for a GPU; empty if there are none.

    **Raises:** `ArgumentError` if the file does not read as tile sizes.
    """
    path = folder() / f"{name}.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        # Files of version 0.2 may hold booleans besides.
        items = [(key, value) for key, value in entries.items() if not isinstance(value, bool)]
        return {key: Tiling(*map(int, value)) for key, value in items}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"{path} does not read as tiles ({error}); delete it, and run `headway tune` for new "
            "ones"
        ) from error


def store(name: str, tuned: TunedTilings) -> Path:
    """Add sizes to the GPU's file. Other processes may write to it at the same time."""
    import filelock  # installed with PyTorch; only `headway tune` needs it

    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / f"{name}.json"
    with filelock.FileLock(path.with_suffix(".lock")):
        load.cache_clear()
        merged = load(name) | tuned
        text = json.dumps({key: astuple(merged[key]) for key in sorted(merged)}, indent=1)
        part = path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, path)  # a reader sees the old file or the new one
    load.cache_clear()
    return path
