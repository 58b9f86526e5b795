"""The place of a process among ranks, from the mesh that a layout is given."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..types import as_int

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Place(NamedTuple):
    """A rank, the number of ranks, their device, and the names of process groups, which are empty
    where there are none yet.

    - `node`: ranks of a node on a mesh of two dimensions (nodes, ranks of a node): rank r is in
      node r // node. 0 on a mesh of one.
    - `group`, `inside`, `between`: of all ranks, of this node's ranks, and of the ranks with this
      rank's place in every node.
    """

    rank: int
    ranks: int
    device: torch.device
    group: str = ""
    node: int = 0
    inside: str = ""
    between: str = ""


def place_of(mesh: Any) -> Place:
    """Return the place that a `DeviceMesh` of one dimension or two, a process group, or a pair
    gives to this process.

    **Raises:** `ArgumentError` for anything else.
    """
    if isinstance(mesh, tuple | list) and len(mesh) == 2:
        return _of_pair(mesh)
    import torch.distributed as dist

    device_type, node, names = None, 0, ("", "")
    if hasattr(mesh, "get_group") and hasattr(mesh, "mesh_dim_names"):  # a DeviceMesh
        device_type, node = mesh.device_type, mesh.size(1) if mesh.ndim == 2 else 0
        if mesh.ndim == 2:
            names = mesh.get_group(1).group_name, mesh.get_group(0).group_name
        mesh = _flat(mesh).get_group()
    if not dist.is_available() or not isinstance(mesh, dist.ProcessGroup):
        raise ArgumentError(
            f"mesh is of type {type(mesh).__name__}; pass a DeviceMesh of one dimension or two, a "
            "process group, or a pair (rank, ranks)"
        )
    rank, ranks = dist.get_rank(mesh), dist.get_world_size(mesh)
    if rank < 0:
        raise ArgumentError("this process is not one of the mesh's ranks")
    if device_type is None:  # gloo's groups serve every device: then the accelerator, if any
        device_type, served = "cpu", {device.type for device in mesh._device_types}
        if torch.accelerator.is_available():
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None and accelerator.type in served:
                device_type = accelerator.type
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, torch.accelerator.current_device_index())
    return Place(rank, ranks, device, mesh.group_name, node, *names)


def _of_pair(mesh: Any) -> Place:
    """Return the place of (rank, ranks) or (rank, (nodes, ranks of a node))."""
    shape = mesh[1] if isinstance(mesh[1], tuple | list) else [mesh[1]]
    rank, sizes = as_int(mesh[0]), [as_int(n) for n in shape]
    positive = [n for n in sizes if n is not None and n > 0]
    if len(positive) == len(sizes) and len(sizes) in (1, 2):
        ranks = positive[0] * positive[-1] if len(sizes) == 2 else positive[0]
        if rank is not None and 0 <= rank < ranks:
            node = positive[1] if len(sizes) == 2 else 0
            return Place(rank, ranks, torch.device("cpu"), node=node)
    raise ArgumentError(
        f"mesh={mesh!r}: as a pair it is (rank, ranks), 0 <= rank < ranks, or "
        "(rank, (nodes, ranks of a node))"
    )


def _flat(mesh: "DeviceMesh") -> "DeviceMesh":
    """Flatten a mesh to one dimension with all of its ranks.

    **Raises:** `ArgumentError` for more than two dimensions, and for two that have no names or
    whose ranks are not in ascending order, node after node.
    """
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return mesh
    if mesh.ndim != 2:
        raise ArgumentError(
            f"the mesh has {mesh.ndim} dimensions {names}; pass the one along which the sequence "
            'is cut, mesh["cp"], or two, nodes and the ranks of a node, mesh["between", "inside"]'
        )
    if not names:
        raise ArgumentError(
            "the mesh has two dimensions without names; make it with "
            'mesh_dim_names=("between", "inside"): nodes, and the ranks of a node'
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ArgumentError(
            f"the mesh's ranks {ranks} are not in ascending order: its last dimension is the ranks "
            "of a node, which have neighbouring numbers"
        )
    return mesh._flatten()
