"""Attention of DTensors whose batch or heads are sharded (data and tensor parallel).

A score or mask that looks at `b` or `h` sees the indices of the whole, not of the shard, and a
learned tensor that it captures gets the gradient of all shards.
"""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .. import ops
from ..api import prepare
from ..errors import ArgumentError
from ..mods.base import MaskFn, ScoreFn
from ..types import Coords


def attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    score: ScoreFn | None = None,
    mask: MaskFn | None = None,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> DTensor:
    """`headway.attention` of DTensors `(b, heads, length, width)`, without communication.

    **Arguments:** as `headway.attention`; q, k and v have one mesh and the same placements, each of
    them `Shard(0)` (batch), `Shard(1)` (heads: those of q and of k must divide evenly) or
    `Replicate()`. A captured tensor that requires grad must be a DTensor replicated on that mesh.
    With dropout, give one `seed` to all ranks.

    **Returns:** a DTensor placed as q.

    **Raises:** `ArgumentError` for other placements.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise ArgumentError(f"{name} must be a DTensor, got {type(x).__name__}")
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            raise ArgumentError(
                f"q, k and v must have one mesh and the same placements: q {q.placements}, {name} "
                f"{x.placements}; move with .redistribute()"
            )
    mesh, placements = q.device_mesh, q.placements
    for n, where in enumerate(placements):
        if where not in (Shard(0), Shard(1), Replicate()):
            raise ArgumentError(
                f"placements {placements}: only batch, Shard(0), and heads, Shard(1), are sharded "
                "here; for sharded lengths see headway.distributed"
            )
        if where == Shard(1) and (q.shape[1] % mesh.size(n) or k.shape[1] % mesh.size(n)):
            raise ArgumentError(
                f"{mesh.size(n)} ranks do not divide {q.shape[1]} query and {k.shape[1]} key heads"
            )
    if dropout and seed is None:
        raise ArgumentError("dropout of DTensors needs a seed, the same number on every rank")
    _, offset = compute_local_shape_and_global_offset(q.shape, mesh, placements)
    spec, call = prepare(
        q.to_local(), k.to_local(), v.to_local(), score, mask, scale=scale, dropout=dropout,
        seed=seed, backend=backend, coords=Coords(b=offset[0], h=offset[1]),
    )  # fmt: skip
    tensors = [_local(t, q) for t in call.captured.tensors]
    call = call._replace(captured=call.captured._replace(tensors=tensors))
    out = ops.attention(spec, call).out
    return DTensor.from_local(out, mesh, placements, run_check=False)


def _local(captured: Any, q: DTensor) -> Tensor:
    """A captured tensor as every rank sees it: whole."""
    if not isinstance(captured, DTensor):
        if captured.requires_grad:
            raise ArgumentError(
                f"a captured tensor {tuple(captured.shape)} requires grad and is no DTensor: each "
                "rank would get the gradient of its own shard; replicate it with "
                "distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)"
            )
        return captured
    whole = (Replicate(),) * q.device_mesh.ndim
    if captured.device_mesh != q.device_mesh or captured.placements != whole:
        raise ArgumentError(
            f"a captured DTensor has placements {captured.placements}; replicate it on q's mesh"
        )
    grads = [Replicate() if p == Replicate() else Partial() for p in q.placements]
    return captured.to_local(grad_placements=grads)
