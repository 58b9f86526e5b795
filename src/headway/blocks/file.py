"""Block masks in safetensors files: numbers and text, nothing that runs when it is read."""

import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, CheckpointError
from ..mods.lowering import Parts, describe, restore
from .decided import Decided
from .mask import BlockMask, Tiles
from .runs import Runs

_FORMAT = "headway block mask 1"


def save(mask: BlockMask, path: str | PathLike) -> None:
    """Write beside the file and rename, so that no half of a file is ever found."""
    SafetensorError, _, save_file = _safetensors()
    if mask.decided is not None:
        mask.decided.check()
    parts = describe(mask.mask)
    if parts.functions:
        names = ", ".join(getattr(fn, "__qualname__", repr(fn)) for fn in parts.functions)
        raise ArgumentError(
            f"the mask holds Python code that no file can hold: {names}; make it of the library's "
            "values to save it, or build the block mask again where it is needed"
        )
    # A tensor that the mask holds twice is written once, and is one tensor again when read.
    distinct = list({id(t): t for t in parts.tensors}.values())
    known = {id(t): n for n, t in enumerate(distinct)}
    head = {
        "format": _FORMAT,
        "shape": mask.shape,
        "tile": mask.tile,
        "structure": parts.structure,
        "tensors": [known[id(t)] for t in parts.tensors],
        "ints": list(map(int, parts.ints)),
        "floats": [x.hex() for x in map(float, parts.floats)],
    }
    tensors = {f"tiles.{n}": t for n, t in enumerate(mask.tiles.flatten())}
    tensors |= {f"mask.{n}": t.detach() for n, t in enumerate(distinct)}
    # A view or a shared storage would be refused; copies are small.
    tensors = {name: t.cpu().contiguous().clone() for name, t in tensors.items()}
    beside = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    try:
        save_file(tensors, beside, {"headway": json.dumps(head)})
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the block mask could not be written to {path}: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def load(path: str | PathLike, device: torch.device | str = "cpu") -> BlockMask:
    """Read what `save` wrote, and check that it is whole."""
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
        of_mask = [tensors[f"mask.{n}"] for n in head["tensors"]]
        floats = [float.fromhex(x) for x in head["floats"]]
        parts = Parts(head["structure"], [], of_mask, head["ints"], floats)
        made = restore(parts)
        shape, tile = tuple(head["shape"]), tuple(head["tile"])
        mask = BlockMask(made, shape, tile, tiles, Decided.by(made))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds only a part of a block mask: {error!r}") from error
    _check(mask, path)
    return mask


def _safetensors() -> tuple[Any, Any, Any]:
    """The package's exception, its reader and its writer."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "files of block masks need safetensors: pip install 'headway[cli]'"
        ) from error
    return safetensors.SafetensorError, safetensors.safe_open, safetensors.torch.save_file


def _check(mask: BlockMask, path: str | PathLike) -> None:
    """Kernels trust the runs of a block mask; a file is not to be trusted."""
    groups, (rows, cols) = mask.shape[0] * mask.shape[1], mask.grid
    t = mask.tiles
    good = (
        _whole(t.rows_full, groups * rows, cols)
        and _whole(t.rows_partial, groups * rows, cols)
        and _whole(t.cols_full, groups * cols, rows)
        and _whole(t.cols_partial, groups * cols, rows)
        and _is_order(t.row_order, groups * rows)
        and _is_order(t.col_order, groups * cols)
    )
    if not good:
        raise CheckpointError(f"{path} holds a block mask whose tiles do not fit its shape")


def _whole(runs: Runs, rows: int, width: int) -> bool:
    if any(x.dtype != torch.int32 or x.dim() != 1 for x in runs):
        return False
    offsets, start, count = (x.long() for x in runs)
    if (
        runs.rows != rows
        or len(start) != len(count)
        or int(offsets[0])
        or (torch.diff(offsets) < 0).any()
    ):
        return False
    return int(offsets[-1]) == len(start) and bool(
        ((start >= 0) & (count > 0) & (start + count <= width)).all()
    )


def _is_order(order: Tensor, n: int) -> bool:
    return order.dtype == torch.int32 and torch.equal(
        order.long().sort().values, torch.arange(n, device=order.device)
    )
