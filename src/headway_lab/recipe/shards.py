"""Checkpoints of a run on several devices: PyTorch's distributed checkpoint, a folder.

Every rank writes and reads its own shards, and a run may be resumed on another number of devices.
(`checkpoint.py` has those of one device: one file.)
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from headway.errors import CheckpointError

from .checkpoint import TrainingState, drop_outdated, flat, unflat


def save_shards(folder: Path, state: TrainingState, first: bool) -> Path:
    """Write `step-000100` for step 100 and drop all but the last two. All ranks call it.

    Raises CheckpointError if a tensor is not finite or the folder cannot be written.
    """
    path = folder / f"step-{state.step:06d}"
    beside = folder / f".step-{state.step:06d}.partial"
    tensors = flat(state) | {"step": torch.tensor(state.step)}
    parts = (t.to_local() if hasattr(t, "to_local") else t for t in tensors.values())  # type: ignore[attr-defined]
    finite = all(bool(part.isfinite().all()) for part in parts)
    if not _all(finite):
        raise CheckpointError(
            f"a tensor holds NaN or infinity after step {state.step}: not saved. The last good "
            f"checkpoints are in {folder}; start a new run with a smaller --lr"
        )
    try:
        dcp.save(tensors, checkpoint_id=beside)
    except Exception as error:
        raise CheckpointError(f"could not write {path}: {error}") from error
    if first:
        if path.exists():
            shutil.rmtree(path)
        os.replace(beside, path)
        drop_outdated(folder)
    _all(True)  # the others go on when it is there
    return path


def load_shards(path: Path, model: torch.nn.Module) -> TrainingState:
    """Read the state in a folder, cut as the model's parameters are now.

    Raises CheckpointError if it cannot be read or is not what was written.
    """
    try:
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        ours = {f"model/{name}": t for name, t in model.state_dict().items()}
        params = dict(model.named_parameters())
        tensors: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.int64)}
        for key, about in metadata.items():
            if key == "step":
                continue
            template = ours.get(key)
            if template is None:
                template = params.get(key.removeprefix("optimizer/").rpartition("/")[0])
            size, dtype = about.size, about.properties.dtype  # type: ignore[union-attr]
            tensors[key] = (
                torch.zeros_like(template, dtype=dtype)
                if template is not None and template.shape == size
                else torch.zeros(size, dtype=dtype)
            )
        dcp.load(tensors, checkpoint_id=path, no_dist=not dist.is_initialized())
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged ({error}): delete or move it"
        ) from error
    return unflat(int(tensors.pop("step")), tensors)


def whole(t: Tensor) -> Tensor:
    """Return a tensor in one piece, on every rank. All ranks call it."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[attr-defined]


def placed(tensor: Tensor, template: Any) -> Tensor:
    """Shard a full tensor like `template`; return a sharded one as it is."""
    if not hasattr(template, "device_mesh") or hasattr(tensor, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(template.device), template.device_mesh, template.placements)


def _all(mine: bool) -> bool:
    """Return True if the flag is set on every rank."""
    if not dist.is_initialized():
        return mine
    flags = [mine] * dist.get_world_size()
    dist.all_gather_object(flags, mine)
    return all(flags)
