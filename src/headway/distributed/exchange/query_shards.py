"""A backend's forward and backward on a rank's queries: one kernel, or one per contiguous shard."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...backends import get
from ...backends.base import Call
from ...blocks import Tiles
from ...operators import results_like
from ...types import REPLICATED_KV, Coords, Forward, Grads, Spec, acc_dtype, in_dtype
from .comm_plan import Transport
from .global_mask import are_contiguous, contiguous_in_tiles, coords_of
from .in_progress import guarded
from .plan_inputs import Plan, PlanInputs, sum_captured_grads

_MIN_SHARD_ROWS = 1024  # rows of a shard that is worth a kernel of its own


@dataclass(frozen=True)
class QueryShard:
    """Some of a rank's queries, which one kernel computes.

    - `rows`: which of the rank's queries.
    - `coords`: positions of these queries and of their keys.
    - `tiles`, `tile_info`: the block mask, as `Call.tiles` and `Spec.tiles` hold it.
    """

    rows: slice
    coords: Coords
    tiles: Tiles | None = None
    tile_info: tuple[int, int, int, int] | None = None

    def call(self, spec: Spec, call: Call) -> tuple[Spec, Call]:
        """Return the spec and the call of this shard."""
        q = self.select(call.q)
        buffers = call.into if q is call.q else ()  # they are for all rows
        call = call.replace(q=q, coords=self.coords, tiles=self.tiles, into=buffers)
        return spec.replace(tiles=self.tile_info), call

    def select(self, x: Tensor) -> Tensor:
        """Return the shard's rows of x `(b, h, tokens, ...)`. All rows are x itself, since making a
        view costs microseconds."""
        rows = self.rows
        return x if rows.stop - rows.start == x.shape[2] else x[:, :, rows]


class BackwardInputs(NamedTuple):
    """The inputs of a backward besides its call."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    needs: tuple[bool, ...]

    def select_heads(self, heads: slice) -> "BackwardInputs":
        """Return the inputs of some query heads."""
        if heads.stop - heads.start == self.out.shape[1]:
            return self
        dlse = None if self.dlse is None else self.dlse[:, heads]
        out, lse, dout = (x[:, heads] for x in (self.out, self.lse, self.dout))
        return BackwardInputs(out, lse, dout, dlse, self.needs)

    def select_rows(self, shard: QueryShard) -> "BackwardInputs":
        """Return the inputs of a shard's rows."""
        dlse = None if self.dlse is None else shard.select(self.dlse)
        out, lse, dout = (shard.select(x) for x in (self.out, self.lse, self.dout))
        return BackwardInputs(out, lse, dout, dlse, self.needs)


def query_shards(
    inputs: PlanInputs, q_heads: range, kv_ranges: np.ndarray, needed_tiles: np.ndarray | None
) -> list[QueryShard]:
    """Cut a rank's queries into shards of one kernel each. Their coordinates lack the head.

    - `kv_ranges`: positions of the keys, (start, stop).
    - `needed_tiles`: the key tiles that these are; None: all keys are there.
    """
    q_ranges, tile_info = inputs.q.ranges_of(inputs.rank), None
    if inputs.mask is not None:
        mask_heads = len(q_heads) if inputs.mask.h > 1 else 1
        tile_info = (inputs.mask.b, mask_heads, *inputs.mask.tile)
    groups = [q_ranges]
    if splits_queries(inputs, kv_ranges):
        groups = np.split(q_ranges, len(q_ranges))
    shards, stop = [], 0
    for group in groups:
        rows = slice(stop, stop := stop + int((group[:, 1] - group[:, 0]).sum()))
        tiles = None
        if inputs.mask is not None:
            tiles = inputs.mask.select(q_heads, inputs.rank, needed_tiles, group)
        coords = coords_of((inputs.offsets[0], 0), group, kv_ranges, inputs.device)
        shards.append(QueryShard(rows, coords, tiles, tile_info))
    return shards


def splits_queries(inputs: PlanInputs, kv_ranges: np.ndarray) -> bool:
    """Return whether each contiguous range of a rank's queries gets a kernel of its own. Kernels
    with contiguous queries and keys read a score's table by distance; where ranges begin inside of
    a tile they also add affine scores by tensor cores, and compute positions in 32 bits."""
    q_ranges = inputs.q.ranges_of(inputs.rank)
    gains = (
        inputs.score_reads_distance
        if contiguous_in_tiles(q_ranges)
        else inputs.score_reads_positions
    )
    return (
        gains
        and inputs.device.type == "cuda"
        and are_contiguous(kv_ranges)
        and (inputs.mask is None or inputs.mask.has_whole_tiles)
        and 1 < len(q_ranges) <= 4
        and int((q_ranges[:, 1] - q_ranges[:, 0]).min()) >= _MIN_SHARD_ROWS
    )


def forward_shards(spec: Spec, call: Call, shards: list[QueryShard]) -> Forward:
    """Run a backend's forward on every shard. Where it fails, the results are NaN (`guarded`)."""

    def compute() -> Forward:
        backend = get(spec.backend)
        return _concatenate([backend.forward(*shard.call(spec, call)) for shard in shards])

    def instead() -> Forward:
        results = results_like(spec.text, call.q, call.v, call.q.shape[0])
        return Forward(*[x.fill_(torch.nan) for x in results])

    return guarded(compute, instead)


def prepare_shards(
    spec: Spec, call: Call, shards: list[QueryShard], inputs: BackwardInputs
) -> list[Any]:
    """Run a backend's `prepare`, the preprocess of a backward, on every shard."""

    def compute() -> list[Any]:
        prepare = get(spec.backend).prepare
        return [prepare(*shard.call(spec, call), *inputs.select_rows(shard)) for shard in shards]

    return guarded(compute, lambda: [None] * len(shards))


def backward_shards(
    spec: Spec, call: Call, shards: list[QueryShard], inputs: BackwardInputs,
    prepared: list[Any] | None = None,
) -> Grads:  # fmt: skip
    """Run a backend's backward on every shard. Where it fails, the gradients are NaN (`guarded`).

    - `prepared`: the results of `prepare_shards`.
    """

    def compute() -> Grads:
        backend = get(spec.backend)
        per_shard = []
        for shard, shard_prepared in zip(shards, prepared or [None] * len(shards), strict=True):
            shard_spec, shard_call = shard.call(spec, call)
            shard_call = shard_call._replace(prepared=shard_prepared)
            per_shard.append(backend.backward(shard_spec, shard_call, *inputs.select_rows(shard)))
        return _sum_grads(per_shard)

    def instead() -> Grads:
        dq_dtype, kv_dtype = spec.grad_dtypes(call.q.dtype)
        dtypes = (call.q, dq_dtype), (call.k, kv_dtype), (call.v, kv_dtype)
        dq, dk, dv = (torch.full_like(x, torch.nan, dtype=dtype) for x, dtype in dtypes)
        pairs = zip(call.captured.tensors, inputs.needs, strict=False)
        captured = [
            torch.full_like(t, torch.nan, dtype=acc_dtype(call.q.dtype)) if need else None
            for t, need in pairs
        ]
        return Grads(dq, dk, dv, None, captured)

    return guarded(compute, instead)


def _concatenate(per_shard: list[Forward]) -> Forward:
    """Return the results of all queries from those of consecutive shards."""
    if len(per_shard) == 1:
        return per_shard[0]
    out, lse, max_logit, row_max, entropy = zip(*per_shard, strict=True)
    return Forward(
        torch.cat(out, 2), torch.cat(lse, 2),
        torch.stack(max_logit).amax(0) if max_logit[0].numel() else max_logit[0],
        torch.cat(row_max, 2) if row_max[0].numel() else row_max[0],
        entropy[0],  # empty: calls over ranks have none
    )  # fmt: skip


def _sum_grads(per_shard: list[Grads]) -> Grads:
    """Return the gradients of all queries: dq concatenated, all others summed in order."""
    first, *others = per_shard
    if not others:
        return first
    for grads in others:
        first.k.add_(grads.k)
        first.v.add_(grads.v)
    dsinks = [grads.sink for grads in per_shard if grads.sink is not None]
    return Grads(
        torch.cat([grads.q for grads in per_shard], 2), first.k, first.v,
        torch.stack(dsinks).sum(0) if dsinks else None,
        sum_captured_grads([grads.captured for grads in per_shard]),
    )  # fmt: skip


class LocalKV(Plan):
    """A plan whose keys are all on this rank: nothing is exchanged."""

    received = 0

    def __init__(self, name: str, inputs: PlanInputs, shards: list[QueryShard]) -> None:
        self.name, self.group, self.shards = name, inputs.group, shards

    def forward(self, spec: Spec, call: Call, transport: Transport) -> Forward:
        """See `Plan`."""
        return forward_shards(spec, call, self.shards)

    def backward(self, spec, call, transport, out, lse, dout, dlse, needs):
        inputs = BackwardInputs(out, lse, dout, dlse, needs)
        unrounded = spec.replace(exact_kv=spec.exact_kv or len(self.shards) > 1)  # sums are rounded
        grads = backward_shards(unrounded, call, self.shards, inputs)
        _, kv_dtype = spec.grad_dtypes(call.q.dtype)
        return grads._replace(k=in_dtype(grads.k, kv_dtype), v=in_dtype(grads.v, kv_dtype))


def replicated_kv_plan(inputs: PlanInputs) -> LocalKV:
    """Return the plan of a rank's queries over keys that every rank has."""
    all_keys = np.array([[0, inputs.kv.length]])
    shards = query_shards(inputs, range(inputs.sizes.hq), all_keys, None)
    h = inputs.offsets[1]
    placed = [replace(shard, coords=shard.coords._replace(h=h)) for shard in shards]
    return LocalKV(REPLICATED_KV, inputs, placed)


def all_tokens_plan(inputs: PlanInputs) -> LocalKV:
    """Return the plan of queries and keys of all tokens, in the order of the sequence."""
    tiles = tile_info = None
    mask = inputs.mask
    if mask is not None and mask.has_whole_tiles:
        tiles, tile_info = mask.tiles, (mask.b, mask.h, *mask.tile)
    shard = QueryShard(slice(0, inputs.q.length), Coords(*inputs.offsets), tiles, tile_info)
    return LocalKV("all tokens", inputs, [shard])
