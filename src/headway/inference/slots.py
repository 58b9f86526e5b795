"""Write keys and values to the slots that a serving engine hands over."""

from typing import Any

import torch
from torch import Tensor

from ..arguments import DTYPES, check_scale, shown
from ..backends.slots import write_slots
from ..errors import ArgumentError
from ..surroundings import host_can_read, is_batched, transforms, unwrapped
from ..types import FLOAT8, named_under_compile


@named_under_compile
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

    Slot s is place `s % page` of page `s // page`. A token whose slot is -1 is skipped. One kernel
    on a GPU, also in a CUDA graph whose slots change; the host reads nothing. Without a gradient.

    **Arguments:**

    - `k`, `v`: `(tokens, hk, d)` and `(tokens, hk, dv)`, with any strides, converted to the
      cache's dtype; for float8 clamped to its range.
    - `k_cache`, `v_cache`: `(pages, hk, page, ·)` as `inference.attention` takes them, with any
      strides: an engine's `(pages, page, hk, ·)` is a view, `.transpose(1, 2)`.
    - `slot_mapping`: int32 or int64 `(tokens,)`. A slot outside of the cache is an error on the
      CPU; elsewhere its token is skipped. If several tokens have one slot, each number there
      comes from one of them.
    - `k_scale`, `v_scale`: float tensors by which k and v are divided, in the accumulation dtype.

    If both caches share memory, as in MLA, k and v must have the same numbers for it.

    **Raises:** `ArgumentError`, before anything is written.
    """
    _check(k, v, k_cache, v_cache, slot_mapping)
    _check_scale("k_scale", k_scale, k)
    _check_scale("v_scale", v_scale, v)
    check_mapped("write", (k_cache, v_cache), (k, v, slot_mapping))
    slots = k_cache.shape[0] * k_cache.shape[2]
    if slot_mapping.is_cpu and host_can_read(slot_mapping) and slot_mapping.numel():
        low, high = map(int, slot_mapping.aminmax())
        if low < -1 or high >= slots:
            raise ArgumentError(
                f"slot_mapping has slots from {low} to {high}, but the cache has 0 to {slots - 1} "
                "(and -1 skips a token)"
            )
    write_slots(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def check_mapped(call: str, targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    """Refuse what `torch.vmap` maps over where it is written to memory that all entries share."""
    if torch.compiler.is_compiling() or not transforms():
        return
    mapped, shared = (
        any(is_batched(unwrapped(x)) == batched for x in tensors)
        for tensors, batched in ((sources, True), (targets, False))
    )
    if mapped and shared:
        raise ArgumentError(
            f"{call}: torch.vmap maps over what is written, but not over the tensor that it is "
            "written to, which all entries share; write outside of torch.vmap"
        )


def is_expanded(x: Tensor) -> bool:
    """Return whether several elements of a tensor are one number in memory."""
    strides = x.stride()
    return 0 in strides and any(
        size > 1 and step == 0 for size, step in zip(x.shape, strides, strict=True)
    )


def _check_scale(name: str, scale: Any, new: Tensor) -> None:
    if scale is None:
        return
    check_scale(name, scale, "() or (hk,)", (new.shape[1],))
    if scale.device != new.device:
        raise ArgumentError(f"{name} is on {scale.device}, k on {new.device}; move it with .to()")


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
        writable = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        if not writable and cache.is_inference():
            raise ArgumentError(
                f"{name}_cache was made under torch.inference_mode(), outside of which PyTorch "
                "writes to no such tensor; write under it, or make the cache outside"
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
