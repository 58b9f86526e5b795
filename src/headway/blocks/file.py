"""Save block masks to safetensors files, which hold numbers and text but no code."""

import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, CheckpointError
from ..mods.base import MaskFn
from ..mods.lowering import Parts, describe, restore
from .provenance import Provenance
from .runs import Runs
from .tiles import Tiles

_FORMAT = "headway block mask 1"

Shape = tuple[int, int, int, int]


def save(
    path: str | PathLike, mask: MaskFn, shape: Shape, tile: tuple[int, int], tiles: Tiles
) -> None:
    """Write beside the file and rename it, so that no reader sees an incomplete file.

    **Raises:** `ArgumentError` for a mask with a Python function in it, `CheckpointError` where the
    file cannot be written.
    """
    SafetensorError, _, save_file = _safetensors()
    parts = describe(mask)
    if parts.functions:
        names = ", ".join(getattr(fn, "__qualname__", repr(fn)) for fn in parts.functions)
        raise ArgumentError(
            f"the mask holds Python code that no file can hold: {names}; make it of the library's "
            "values to save it, or build the block mask again where it is needed"
        )
    # A tensor that the mask holds twice is written once, and is one tensor when read.
    distinct = list({id(t): t for t in parts.tensors}.values())
    number_of = {id(t): n for n, t in enumerate(distinct)}
    head = {
        "format": _FORMAT, "shape": shape, "tile": tile, "structure": parts.structure,
        "tensors": [number_of[id(t)] for t in parts.tensors], "ints": list(map(int, parts.ints)),
        "floats": [x.hex() for x in map(float, parts.floats)],
    }  # fmt: skip
    tensors = {f"tiles.{n}": t for n, t in enumerate(tiles.flatten())}
    tensors |= {f"mask.{n}": t.detach() for n, t in enumerate(distinct)}
    # Safetensors refuses views and shared storage; copies are small.
    tensors = {name: t.cpu().contiguous().clone() for name, t in tensors.items()}
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    try:
        save_file(tensors, temporary, {"headway": json.dumps(head)})
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the block mask could not be written to {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load(
    path: str | PathLike, device: torch.device | str
) -> tuple[MaskFn, Shape, tuple[int, int], Tiles, Provenance]:
    """Read the arguments of `save`, and derive the provenance of the tiles.

    **Raises:** `CheckpointError` for a file that is no complete block mask.
    """
    SafetensorError, safe_open, _ = _safetensors()
    try:
        with safe_open(os.fspath(path), "pt", device=str(device)) as file:
            head = json.loads((file.metadata() or {}).get("headway", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    if head.get("format") != _FORMAT:
        raise CheckpointError(f"{path} holds no block mask of a format this version reads")
    try:
        tiles = Tiles.unflatten([tensors[f"tiles.{n}"] for n in range(14)])
        mask_tensors = [tensors[f"mask.{n}"] for n in head["tensors"]]
        floats = [float.fromhex(x) for x in head["floats"]]
        parts = Parts(head["structure"], [], mask_tensors, head["ints"], floats)
        mask = restore(parts)
        provenance = Provenance.of(mask)
        (b, h, q_len, kv_len), (tile_q, tile_kv) = head["shape"], head["tile"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds only a part of a block mask: {error!r}") from error
    grid = -(-q_len // tile_q), -(-kv_len // tile_kv)
    if not _fit(tiles, b * h, *grid):
        raise CheckpointError(f"{path} holds a block mask whose tiles do not fit its shape")
    return mask, (b, h, q_len, kv_len), (tile_q, tile_kv), tiles, provenance


def _safetensors() -> tuple[Any, Any, Any]:
    """Return the package's exception, its reader and its writer."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "files of block masks need safetensors: pip install safetensors"
        ) from error
    return safetensors.SafetensorError, safetensors.safe_open, safetensors.torch.save_file


def _fit(t: Tiles, groups: int, rows: int, cols: int) -> bool:
    """Return whether tiles fit a grid: kernels trust the runs of a block mask."""
    by_row = all(_are_valid_runs(x, groups * rows, cols) for x in (t.rows_full, t.rows_partial))
    by_col = all(_are_valid_runs(x, groups * cols, rows) for x in (t.cols_full, t.cols_partial))
    ordered = _is_order(t.row_order, groups * rows) and _is_order(t.col_order, groups * cols)
    return by_row and by_col and ordered


def _are_valid_runs(runs: Runs, rows: int, width: int) -> bool:
    """Return whether runs are ordered, and stay within rows and width."""
    if any(x.dtype != torch.int32 or x.dim() != 1 for x in runs):
        return False
    offsets, start, count = (x.long() for x in runs)
    if runs.rows != rows or len(start) != len(count) or int(offsets[0]):
        return False
    within = (start >= 0) & (count > 0) & (start + count <= width)
    rising = not bool((torch.diff(offsets) < 0).any())
    return rising and int(offsets[-1]) == len(start) and bool(within.all())


def _is_order(order: Tensor, n: int) -> bool:
    """Return whether a tensor is an order of n rows."""
    return order.dtype == torch.int32 and torch.equal(
        order.long().sort().values, torch.arange(n, device=order.device)
    )
