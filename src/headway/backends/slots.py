"""Writes of keys and values to the slots of a cache: a kernel on a GPU, elsewhere PyTorch's ops."""

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..surroundings import are_plain, operators_are_changed
from ..types import FLOAT8, acc_dtype, in_dtype
from . import triton
from .gpu import inference


def write_slots(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:  # fmt: skip
    """Write the key and value of every token to its slot: place `slot % page` of page
    `slot // page`. A token whose slot is outside of the cache is skipped.

    - `k`, `v`: `(tokens, hk, ·)`, divided by their scales, `()` or `(hk,)`, and converted to the
      dtype of the caches, `(pages, hk, page, ·)`; for float8 clamped to its range.

    There is no operator: for one that writes to views, compilers other than Inductor take the
    offset of a tensor in its storage from the call that they traced (PyTorch 2.13).
    """
    slot_count = k_cache.shape[0] * k_cache.shape[2]
    if not slots.shape[0] or not k_cache.shape[1] or not slot_count:
        return
    k, v = _convertible(k, k_cache, k_scale), _convertible(v, v_cache, v_scale)
    tensors = k, v, k_cache, v_cache, slots, k_scale, v_scale
    direct = not (is_compiling() or operators_are_changed()) and are_plain(*tensors)
    if direct and not triton.unavailable(k.device.type, k.device.index):
        torch.autograd.graph.increment_version((k_cache, v_cache))
        inference.write_slots(*tensors)
        return
    with torch.no_grad():
        slot, page = slots.long(), k_cache.shape[2]
        reads = direct and slots.is_cpu
        valid = (slot >= 0) & (slot < slot_count)
        if reads:
            (source,) = valid.nonzero(as_tuple=True)
            slot = slot[source]
        else:
            # A token without a slot repeats what the first token with one writes, to the same
            # place. If there is none, all write what slot 0 holds.
            tokens = torch.arange(len(slot), device=slot.device)
            source = torch.where(valid, tokens, valid.int().argmax())
            slot = torch.where(valid.any(), slot[source], 0)
        where = slot // page, slot % page
        for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            by_place = _bits(cache).transpose(1, 2)
            numbers = _bits(_as_stored(new[source], cache.dtype, scale))
            if not reads:
                numbers = torch.where(valid.any(), numbers, by_place[0, 0])
            by_place[where] = numbers


def _convertible(new: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    """Return float8 numbers as float32, unless they are only copied."""
    copied = new.dtype == cache.dtype and scale is None
    return new.float() if new.dtype.itemsize == 1 and not copied else new


def _as_stored(new: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return new numbers as a cache of this dtype stores them."""
    if scale is not None:
        acc = acc_dtype(new.dtype)
        new = in_dtype(new, acc) / in_dtype(scale, acc).reshape(-1, 1)
    if dtype in FLOAT8 and new.dtype != dtype:
        largest = torch.finfo(dtype).max
        new = new.clamp(-largest, largest)
    return new.to(dtype)


def _bits(x: Tensor) -> Tensor:
    """Return float8 numbers as bytes, since PyTorch writes none by index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
