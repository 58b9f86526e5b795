"""Build the tiles of a mask, and cache them."""

from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import record_function

from ..caches import TensorCache
from ..errors import ArgumentError
from ..mods.graph import Graph
from ..surroundings import capturing, is_batched, outside_transforms, transforms, unwrapped
from ..types import NAMESPACE, Captured, Coords
from .axis_bounds import Axis, Groups
from .quadtree import Search
from .tiles import Tiles

TILE = (128, 128)  # default queries and keys of a tile
_INT32 = 2**31 - 1

TilesForShape = tuple[Tiles, int, int]  # with the b and h that they were built for


def build(
    graph: Graph,
    captured: Captured,
    shape: tuple[int, int, int, int],
    tile: tuple[int, int],
    device: torch.device,
    coords: Coords = Coords(),
) -> tuple[Tiles, int, int]:
    """Return the tiles of a mask's graph over `(b, h, q_len, kv_len)`. A profiler sees a range.

    **Returns:** the tiles, and the b and h that they were built for: 1 where the mask does not
    depend on it.

    **Raises:** `ArgumentError` for invalid lengths or tiles, or a device out of memory;
    `CapturedIndexError` where a kept pair reads past the end of a captured tensor.
    """
    _check(shape, tile)
    per_batch = any(p is not None and p.dim() == 2 for p in (coords.q_pos, coords.kv_pos))
    b = shape[0] if graph.uses("b") or per_batch else 1
    h = shape[1] if graph.uses("h") else 1
    q = Axis("q_idx", shape[2], tile[0], coords.q, coords.q_pos)
    kv = Axis("kv_idx", shape[3], tile[1], coords.kv, coords.kv_pos)
    if b * h * max(q.boxes(0), kv.boxes(0)) > _INT32:
        raise ArgumentError(
            f"tile={tile} cuts {b} batch rows, {h} heads and lengths {shape[2:]} into more rows of "
            "tiles than an int32 counts; use larger tiles"
        )
    try:
        # The result is plain tensors in any mode of the caller, so it can be cached and saved.
        profiler_range = record_function(f"{NAMESPACE}::block_mask")
        with torch.inference_mode(False), torch.no_grad(), profiler_range:
            search = Search(graph, captured, Groups(b, h, coords.b, coords.h), q, kv, device)
            return search.run(), b, h
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate" not in str(error):
            raise
        raise ArgumentError(
            f"device={str(device)!r} has no room for the block mask of {shape} in tiles of {tile}; "
            f"use larger tiles, or build on the CPU and move it with .to()\n    {error}"
        ) from error


def _check(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    for name, number in zip(("b", "h", "q_len", "kv_len"), shape, strict=True):
        if number < 0:
            raise ArgumentError(f"{name}={number} must be 0 or more")
    if len(tile) != 2 or min(tile) < 1:
        raise ArgumentError(f"tile={tile} must be two positive integers")


# -- cache ----------------------------------------------------------------------------------------

_cache: TensorCache[TilesForShape] = TensorCache(64)


def cached_build(
    graph: Graph,
    captured: Captured,
    shape: tuple[int, int, int, int],
    tile: tuple[int, int],
    device: torch.device,
    coords: Coords = Coords(),
    run: Callable[[Callable[[], TilesForShape]], TilesForShape] = lambda build_now: build_now(),
) -> TilesForShape:
    """Return what `build` does, cached while the captured tensors live and are not written to.

    The cache identifies tensors by identity and version counter. Tensors made in inference mode
    have no version counter, so masks that capture one are built each time. `clear_block_cache`
    names the writes that go unnoticed.

    - `run`: runs `build`, for callers that have to isolate it.

    **Raises:** as `build`; `ArgumentError` for a mask that captures tensors while a CUDA graph is
    being captured, or a tensor that `torch.vmap` maps over.
    """
    if transforms():
        captured = captured._replace(tensors=list(map(unwrapped, captured.tensors)))
        if any(map(is_batched, captured.tensors)):
            raise ArgumentError(
                "a mask captures a tensor that torch.vmap maps over, so its tiles differ by entry; "
                "pass the mask itself to attention, or build the block mask outside"
            )
    tensors = [*captured.tensors, *(p for p in (coords.q_pos, coords.kv_pos) if p is not None)]

    def build_now() -> TilesForShape:
        if any(capturing(t.device) for t in tensors):
            raise ArgumentError(
                "the tiles of a mask that captures tensors cannot be found while a CUDA graph is "
                "being captured: every replay would use them, whatever the tensors hold by then. "
                "Pass the mask itself to the call, or build the block mask before the capture"
            )
        with outside_transforms():
            return run(partial(build, graph, captured, shape, tile, device, coords))

    offsets = coords.b * graph.uses("b"), coords.h * graph.uses("h"), coords.q, coords.kv
    numbers = (*captured.ints, *map(repr, captured.floats), *offsets)
    scattered = coords.q_pos is not None, coords.kv_pos is not None
    return _cache.of(tensors, (graph, shape, tile, device, numbers, scattered), build_now)


def clear_block_cache() -> None:
    """Clear what is cached for tensors: the tiles of masks, the sequences of `cu_seqlens`, and the
    tiles that the lists of FlexAttention's block masks name.

    The tiles of up to 64 masks are cached by the mask's formula and numbers, the sizes, the device,
    and the identity and version counter of the tensors that it captures, for as long as these live.
    A write in place builds them again. Call this after a write that PyTorch does not count: through
    `tensor.data`, or through anything that shares the tensor's memory (a NumPy array, DLPack, its
    storage). A `BlockMask` of yours keeps its tiles: build it again. Tensors made in inference mode
    have no version counter, so nothing is cached for them.
    """
    TensorCache.clear_all()
