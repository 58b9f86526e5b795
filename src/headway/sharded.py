"""Attention of DTensors: data and tensor parallel without communication, context parallel by a
layout.

A score or mask sees global indices `b` and `h`, not those of the shard. A trained tensor that it
captures gets the gradient of all shards.
"""

from typing import Any

import torch
from torch import Tensor

from .backends.base import Call
from .blocks import BlockMask
from .distributed.context import Layouts, tell_refusal
from .distributed.layout import Layout
from .errors import ArgumentError
from .memory_order import new_in_order_of
from .types import KV, Forward, Request


def any_sharded(q: Any, k: Any, v: Any) -> bool:
    """Return whether any of them is a DTensor, by the name of its class: its import takes a
    second."""
    return "DTensor" in (type(q).__name__, type(k).__name__, type(v).__name__)


class Sharded:
    """A call of DTensors as its rank computes it.

    q, k and v have one mesh and the same placements: `Shard(0)` (batch), `Shard(1)` (heads, which
    must divide evenly), `Replicate()`, and at most once `Shard(2)` (sequence), where k and v may
    also be `Replicate()`. The sequence is cut as DTensors are, or as the call's layout says for
    that dimension of the mesh. Trained tensors
    that the score captures are DTensors replicated on the mesh. A sink may have any placement. With
    dropout, all ranks need one seed.

    **Raises:** `ArgumentError` for anything else.
    """

    def __init__(self, request: Request) -> None:
        try:
            self._place(request)
        except BaseException as error:  # noqa: BLE001 raised below
            raise tell_refusal(_any_layout(request), error)  # noqa: B904 the same error

    def _place(self, request: Request) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        q, k, v, mask = request.q, request.k, request.v, request.mask
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, DTensor):
                raise ArgumentError(
                    f"{name} is not a DTensor, but another of q, k and v is; convert it with "
                    "distribute_tensor() or DTensor.from_local()"
                )
        all_keys = tuple(Replicate() if p == Shard(2) else p for p in q.placements)
        for name, x in (("k", k), ("v", v)):
            whole_kv = k.placements == v.placements == all_keys
            if x.device_mesh != q.device_mesh or not (x.placements == q.placements or whole_kv):
                raise ArgumentError(
                    f"q, k and v must have one mesh and the same placements: q {q.placements}, "
                    f"{name} {x.placements}; move with .redistribute()"
                )
        self.mesh, self.placements = q.device_mesh, q.placements
        self.replicates_kv = k.placements != q.placements
        for n, place in enumerate(self.placements):
            if place not in (Shard(0), Shard(1), Shard(2), Replicate()):
                raise ArgumentError(
                    f"placements {self.placements}: only batch, Shard(0), heads, Shard(1), and "
                    "length, Shard(2), are sharded here; gather widths with .redistribute()"
                )
            ranks = self.mesh.size(n)
            if place == Shard(1) and (q.shape[1] % ranks or k.shape[1] % ranks):
                raise ArgumentError(
                    f"{q.shape[1]} query heads and {k.shape[1]} key heads must be multiples of the "
                    f"{ranks} ranks that they are sharded over"
                )
        if type(request.keys) is KV and not {Shard(1), Replicate()}.issuperset(self.placements):
            raise ArgumentError(
                f"placements {self.placements}: a cache is sharded along its heads, Shard(1); rows "
                "of a batch are a rank's own: call it with .to_local()"
            )
        if request.dropout and request.seed is None:
            raise ArgumentError("dropout of DTensors needs a seed, the same number on every rank")
        if isinstance(mask, BlockMask) and mask.shape[:2] != (1, 1):
            raise ArgumentError(
                f"the block mask has batch and heads {tuple(mask.shape[:2])}, those of all ranks; "
                "pass its mask instead, or build it with b=1 and h=1"
            )
        if isinstance(mask, BlockMask):
            mask.check_rows(*q.shape[:2])
        _, offset = compute_local_shape_and_global_offset(q.shape, self.mesh, self.placements)
        self.offsets = offset[0], offset[1]
        self.sizes = q.shape
        self.layouts = self._layouts(request)

    def _layouts(self, request: Request) -> Layouts | None:
        """Return the layouts of queries and keys; None where the sequence is not sharded."""
        from torch.distributed.tensor import Shard

        mesh_dims = [n for n, place in enumerate(self.placements) if place == Shard(2)]
        if not mesh_dims:
            if type(request.keys) is Layouts:
                raise ArgumentError(
                    f"a layout was given, but no placement of {self.placements} is Shard(2)"
                )
            return None
        if len(mesh_dims) > 1:
            raise ArgumentError(
                f"placements {self.placements}: the sequence is sharded over one dimension of the "
                "mesh; flatten two of them with mesh._flatten()"
            )
        group = self.mesh.get_group(mesh_dims[0])
        if type(request.keys) is not Layouts:
            q_len, kv_len = request.q.shape[2], request.k.shape[2]
            q_layout = _chunk_layout(q_len, group)
            if self.replicates_kv:
                return Layouts(q_layout, None)
            return Layouts(q_layout, q_layout if q_len == kv_len else _chunk_layout(kv_len, group))
        layouts = request.keys
        if (layouts.kv is None) != self.replicates_kv:
            raise ArgumentError(
                f"k and v have placements {request.k.placements}: where all ranks have all keys "
                "they are Replicate(), with layout=(layout, None); else Shard(2), with a layout"
            )
        if layouts.q.group_name != group.group_name:
            raise ArgumentError(
                "the layout is on another mesh than the dimension that shards the sequence, number "
                f"{mesh_dims[0]} of {self.mesh}"
            )
        return layouts

    def local_request(self, request: Request) -> Request:
        """Return the request for this rank's shards; `local_call` converts the captured tensors."""
        from torch.distributed.tensor import Partial

        keys = request.keys if self.layouts is None else self.layouts
        if type(keys) is KV:
            keys = self._local_cache(keys, request.k)
        # Of keys that all ranks have, each rank computes a share of the gradient.
        grads = [
            Partial() if p != of_k else p
            for p, of_k in zip(self.placements, request.k.placements, strict=True)
        ]
        k, v = (x.to_local(grad_placements=grads) for x in (request.k, request.v))
        return request._replace(
            q=request.q.to_local(), k=k, v=v,
            sink=self._local_sink(request.sink), keys=keys, offsets=self.offsets,
        )  # fmt: skip

    def _local_cache(self, cache: KV, k: Any) -> KV:
        """Return the cache with the scales of this rank's key heads."""
        if cache.k_scale is None and cache.v_scale is None:
            return cache
        count = k.to_local().shape[1]
        first_head = self.offsets[1] * k.shape[1] // self.sizes[1]
        local = lambda scale: None if scale is None else scale[:, first_head : first_head + count]
        return cache._replace(k_scale=local(cache.k_scale), v_scale=local(cache.v_scale))

    def _local_sink(self, sink: Any) -> Any:
        """Return the sinks of this rank's heads."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if sink is None:
            return None
        if not isinstance(sink, DTensor):
            raise ArgumentError(
                "sink is not a DTensor, but q, k and v are: distribute_tensor(sink, q.device_mesh, "
                "[Replicate()] * q.device_mesh.ndim)"
            )
        by_head = [Shard(0) if p == Shard(1) else Replicate() for p in self.placements]
        grads = [
            Partial() if p in (Shard(0), Shard(2)) else h
            for p, h in zip(self.placements, by_head, strict=True)
        ]  # fmt: skip
        return sink.redistribute(placements=by_head).to_local(grad_placements=grads)

    def local_call(self, call: Call) -> Call:
        """Return the call with captured DTensors as local tensors."""
        tensors = [self._replicated(t) for t in call.captured.tensors]
        return call.replace(captured=call.captured._replace(tensors=tensors))

    def _replicated(self, captured: Any) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if not isinstance(captured, DTensor):
            if captured.requires_grad:
                raise ArgumentError(
                    f"a captured tensor {tuple(captured.shape)} requires grad and is not a "
                    "DTensor: each rank would get the gradient of its own shard; replicate it with "
                    "distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)"
                )
            return captured
        replicated = (Replicate(),) * self.mesh.ndim
        if captured.device_mesh != self.mesh or captured.placements != replicated:
            raise ArgumentError(
                f"a captured DTensor has placements {captured.placements}; replicate it on q's mesh"
            )
        grads = [Replicate() if p == Replicate() else Partial() for p in self.placements]
        return captured.to_local(grad_placements=grads)

    def as_dtensors(self, result: Any) -> Any:
        """Return a result, or all of them, as DTensors placed as q."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if isinstance(result, Forward):
            return Forward(*[self.as_dtensors(x) for x in result])
        if result.dim() == 1:
            return result
        # max_logit has no sequence: it is over all tokens.
        reduced = Shard(2) if result.dim() == 2 else None
        places = [Replicate() if p == reduced else p for p in self.placements]
        # Shards of uneven sizes do not determine the global shape.
        shape = torch.Size([
            self.sizes[n] if Shard(n) in places else size for n, size in enumerate(result.shape)
        ])  # fmt: skip
        whole = torch.empty(shape, device="meta", dtype=result.dtype)
        if result.dim() == 4:
            whole = new_in_order_of(result, shape, result.dtype, "meta")
        return DTensor.from_local(
            result, self.mesh, places, run_check=False, shape=shape, stride=whole.stride()
        )


def _any_layout(request: Request) -> Layout | None:
    """Return a layout of the call's ranks, if the sequence of one of the tensors is sharded."""
    from torch.distributed.tensor import DTensor, Shard

    for x in (request.q, request.k, request.v):
        if isinstance(x, DTensor) and Shard(2) in x.placements:
            group = x.device_mesh.get_group(x.placements.index(Shard(2)))
            return _chunk_layout(x.shape[2], group)
    return None


def _chunk_layout(length: int, group: Any) -> Layout:
    """Return the layout of a sequence that is cut as DTensors are, by `torch.chunk`."""
    ranks = group.size()
    size = -(-length // ranks)
    cuts = [min(n * size, length) for n in range(ranks + 1)]
    return Layout(length, [(n, *cuts[n : n + 2]) for n in range(ranks)], group)
