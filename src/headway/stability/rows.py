"""Which rows of a parameter lie on this rank."""

from typing import Any

import torch
from torch import Tensor


def local_part(parameter: Tensor) -> Tensor:
    """Return the tensor that holds this rank's part of a parameter, to be changed in place."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local().detach()
    return parameter.detach()


def local_rows(parameter: Tensor) -> Tensor:
    """The numbers, in the whole, of the rows of `local_part`: int64 on the CPU. No communication.

    Knows plain tensors and DTensors: FSDP2, tensor parallel, both at once.
    """
    rows = torch.arange(parameter.shape[0], device="cpu")
    if not hasattr(parameter, "device_mesh"):
        return rows
    dtensor: Any = parameter
    for dim in _nesting(dtensor.placements):
        mesh = dtensor.device_mesh
        chunks = rows.chunk(mesh.size(dim))
        rank = mesh.get_local_rank(dim)
        rows = chunks[rank] if rank < len(chunks) else rows[:0]
    if len(rows) != len(local_part(parameter)):
        raise NotImplementedError(
            f"cannot tell which rows of a {tuple(parameter.shape)} parameter with placements "
            f"{dtensor.placements} are on this rank"
        )
    return rows


def _nesting(placements: tuple[Any, ...]) -> list[int]:
    """Return the mesh dimensions that cut rows, outermost first; strided ones come after."""
    cuts = [n for n, p in enumerate(placements) if getattr(p, "dim", None) == 0]
    strided = [n for n in cuts if is_strided(placements[n])]
    return [n for n in cuts if n not in strided] + strided[::-1]


def is_strided(placement: Any) -> bool:
    """Return whether FSDP2 shards rows that tensor parallelism has sharded before."""
    return hasattr(placement, "split_factor")
