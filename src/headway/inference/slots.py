"""Write keys and values to the slots that a serving engine hands over."""

from typing import Any

import torch
from torch import Tensor

from ..arguments import DTYPES, shown
from ..errors import ArgumentError
from ..surroundings import host_can_read
from ..types import FLOAT8


def write(
    k: Tensor,  # (tokens, hk, d)
    v: Tensor,  # (tokens, hk, dv)
    k_cache: Tensor,  # (pages, hk, page, d)
    v_cache: Tensor,  # (pages, hk, page, dv)
    slot_mapping: Tensor,  # (tokens,)
    *,
    k_scale: Tensor | None = None,  # () or (hk,)
    v_scale: Tensor | None = None,  # () or (hk,)
) -> None:
    """Write the key and value of every token to its slot in a paged cache.

    Slot s is place `s % page` of page `s // page`. A token whose slot is -1 is skipped. Device work
    alone, also in a CUDA graph whose slots change; without a gradient.

    **Arguments:**

    - `k`, `v`: `(tokens, hk, d)` and `(tokens, hk, dv)`, converted to the cache's dtype; for
      float8 clamped to its range.
    - `k_cache`, `v_cache`: `(pages, hk, page, ·)` as `inference.attention` takes them, with any
      strides: an engine's `(pages, page, hk, ·)` is a view, `.transpose(1, 2)`.
    - `slot_mapping`: int32 or int64 `(tokens,)`. A slot outside of the cache is an error on the
      CPU; elsewhere its token is skipped. If two tokens have one slot, either may be there
      afterwards.
    - `k_scale`, `v_scale`: float tensors by which k and v are divided.

    **Raises:** `ArgumentError`, before anything is written.
    """
    _check(k, v, k_cache, v_cache, slot_mapping)
    scales = _scale("k_scale", k_scale, k), _scale("v_scale", v_scale, v)
    slots, page = k_cache.shape[0] * k_cache.shape[2], k_cache.shape[2]
    if slot_mapping.is_cpu and host_can_read(slot_mapping) and slot_mapping.numel():
        low, high = map(int, slot_mapping.aminmax())
        if low < -1 or high >= slots:
            raise ArgumentError(
                f"slot_mapping has slots from {low} to {high}, but the cache has 0 to {slots - 1} "
                "(and -1 skips a token)"
            )
    if not slots or not k.shape[0]:
        return
    with torch.no_grad():
        slot = slot_mapping.long()
        valid = (slot >= 0) & (slot < slots)
        # A token without a slot repeats what the first token with one writes, to the same place. If
        # there is none, all write what slot 0 holds.
        source = torch.where(
            valid, torch.arange(len(slot), device=slot.device), valid.int().argmax()
        )
        places = torch.where(valid.any(), slot[source], 0)
        where = places // page, places % page
        for new, cache, scale in ((k, k_cache, scales[0]), (v, v_cache, scales[1])):
            by_place = _bytes(cache).transpose(1, 2)
            numbers = _bytes(as_stored(new, cache.dtype, scale))[source]
            by_place[where] = torch.where(valid.any(), numbers, by_place[0, 0])


def is_expanded(x: Tensor) -> bool:
    """Return whether several elements of a tensor are one number in memory."""
    return any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True))


def _bytes(x: Tensor) -> Tensor:
    """Return float8 numbers as bytes, since PyTorch writes none by index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def as_stored(new: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return new numbers, divided by a scale that broadcasts, as a cache of this dtype stores
    them."""
    if scale is not None:
        new = new / scale.to(new.dtype)
    if dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        new = new.clamp(-largest, largest)
    return new.to(dtype)


def _scale(name: str, scale: Any, new: Tensor) -> Tensor | None:
    if scale is None:
        return None
    fits = isinstance(scale, Tensor) and tuple(scale.shape) in ((), (new.shape[1],))
    if not fits or not scale.is_floating_point():
        raise ArgumentError(f"{name} must be a float tensor () or (hk,), got {shown(scale)}")
    if scale.device != new.device:
        raise ArgumentError(f"{name} is on {scale.device}, k on {new.device}; move it with .to()")
    return scale.reshape(-1, 1)


def _check(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
    """Check that new keys and values, caches and slots fit together."""
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if not isinstance(cache, Tensor) or cache.dim() != 4:
            raise ArgumentError(
                f"{name}_cache must be (pages, hk, page, width), got {shown(cache)}"
            )
        if cache.dtype not in (*DTYPES, *FLOAT8):
            raise ArgumentError(
                f"{name}_cache is {cache.dtype}; use a float dtype, float8_e4m3fn or float8_e5m2"
            )
        if is_expanded(cache):
            raise ArgumentError(
                f"{name}_cache has strides {cache.stride()}: pages share memory; pass one that "
                "is not expanded"
            )
        if not isinstance(new, Tensor) or not new.is_floating_point() or new.dim() != 3:
            raise ArgumentError(f"{name} must be floats (tokens, hk, width), got {shown(new)}")
        if new.shape[1:] != cache.shape[1::2]:
            raise ArgumentError(
                f"{name} has (hk, width) = {tuple(new.shape[1:])}, its cache "
                f"{tuple(cache.shape[1::2])}"
            )
        if not new.device == cache.device == k.device:
            raise ArgumentError(f"{name} is on {new.device}, its cache on {cache.device}")
    if k.shape[0] != v.shape[0] or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ArgumentError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same tokens, and the caches "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)} the same pages and heads"
        )
    ints = (torch.int32, torch.int64)
    is_ints = isinstance(slot_mapping, Tensor) and slot_mapping.dtype in ints
    if not is_ints or tuple(slot_mapping.shape) != (k.shape[0],):
        raise ArgumentError(
            f"slot_mapping must be int32 or int64 (tokens,) = ({k.shape[0]},), got "
            f"{shown(slot_mapping)}"
        )
    if slot_mapping.device != k.device:
        raise ArgumentError(
            f"slot_mapping is on {slot_mapping.device}, k on {k.device}; keep it there"
        )
