"""What transformers says of a mask, as values of the library."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..mods import block_table, causal, dense, document, sliding_window
from ..mods import padding as padded_to
from ..mods.base import Both, Either, MaskFn, Not, Shifted, intersection
from .hf_mask import GraphMask


def translate(fn: Callable | None) -> tuple[MaskFn | None, bool]:
    """Return transformers' own mask functions as values of the library, and those of others as they
    are; and whether packed documents are kept apart."""
    from transformers import masking_utils as hf

    if fn is None or fn is hf.bidirectional_mask_function:
        return None, False
    if fn is hf.causal_mask_function:
        return causal(), False
    maker, _, local = getattr(fn, "__qualname__", "").partition(".<locals>")
    if not local or fn.__module__ != hf.__name__:
        return fn, False
    held = {
        name: cell.cell_contents
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    }
    if maker == "sliding_window_overlay":
        return Not(causal(-held["sliding_window"])), False
    if maker == "sliding_window_bidirectional_overlay":
        return sliding_window(held["sliding_window"] + 1), False
    if maker == "packed_sequence_mask_function":
        return document(held["packed_sequence_mask"]), True
    if maker == "or_masks":
        parts = [translate(f)[0] for f in held["mask_functions"]]
        return (None if None in parts else reduce(Either, parts)), False  # type: ignore[arg-type]
    if maker == "and_masks":
        functions = held["mask_functions"]
        packed = any(_maker(f) == "packed_sequence_mask_function" for f in functions)
        if packed:  # inside a document, positions differ as indices do
            functions = [_without_remapping(f) for f in functions]
        pairs = [translate(f) for f in functions]
        parts = [mask for mask, _ in pairs if mask is not None]
        return (reduce(Both, parts) if parts else None), packed or any(p for _, p in pairs)
    return fn, False


def _maker(fn: Callable) -> str:
    return getattr(fn, "__qualname__", "").partition(".<locals>")[0]


def _without_remapping(fn: Callable) -> Callable:
    """Return the mask over indices for one over restarting positions, if only distances count."""
    if _maker(fn) != "remap_positions_for_packed_sequence":
        return fn
    at = fn.__code__.co_freevars.index("mask_function")
    inner = fn.__closure__[at].cell_contents  # type: ignore[index]
    mask, _ = translate(inner)
    return inner if _relative(mask) else fn


def _relative(mask: Any) -> bool:
    """Return whether a mask depends on nothing but kv_idx - q_idx."""
    if isinstance(mask, Both | Either):
        return _relative(mask.first) and _relative(mask.second)
    if isinstance(mask, Not):
        return _relative(mask.mask)
    return mask is None or isinstance(mask, causal | sliding_window)


def shift(mask: MaskFn | None, q_offset: int, kv_offset: int) -> MaskFn | None:
    """Return the mask of local indices 0, 1, ... from one of positions."""
    if mask is None or not (q_offset or kv_offset):
        return mask
    if isinstance(mask, causal):
        return causal(mask.offset + q_offset - kv_offset)
    if q_offset == kv_offset and _relative(mask):
        return mask
    return Shifted(mask, 0, 0, q_offset, kv_offset)


def only_past(mask: Any) -> bool:
    """Return whether no query sees a later key."""
    if isinstance(mask, Both):
        return only_past(mask.first) or only_past(mask.second)
    return isinstance(mask, causal) and mask.offset <= 0


def sees_all(mask: Any, before: int) -> bool:
    """Return whether a query surely sees its own key and the `before` keys before it."""
    if isinstance(mask, Both):
        return sees_all(mask.first, before) and sees_all(mask.second, before)
    if isinstance(mask, Not):
        return isinstance(mask.mask, causal) and mask.mask.offset < -before
    return isinstance(mask, causal) and mask.offset >= 0


def of_padding(padding: Tensor) -> MaskFn:
    """Return the mask of a padding: a range of keys, where the CPU can see one run in every row."""
    if padding.is_cpu and not torch.compiler.is_compiling():
        at = torch.arange(padding.shape[1], device="cpu")
        stops = (padding * (at + 1)).amax(1)
        starts = stops - padding.sum(1)
        if bool((padding == ((at >= starts[:, None]) & (at < stops[:, None]))).all()):
            before, behind = Not(padded_to(starts)), padded_to(stops)
            if bool((stops == padding.shape[1]).all()):
                return before
            return Both(before, behind) if bool(starts.any()) else behind
    return dense(padding[:, None, None, :])


def of_indices(name: str, indices: Tensor, sizes: tuple[int, ...], size: int) -> MaskFn:
    """Return the mask of chosen blocks of `size` keys, by their numbers `(b, hk or 1, l, k)`.

    `sizes` are those of the call: batch, query heads, queries, keys."""
    b, hq, q_len, keys = sizes
    heads = indices.shape[1] if indices.dim() == 4 else 0
    if (*indices.shape[:1], *indices.shape[2:3]) != (b, q_len) or not heads or hq % heads:
        raise ArgumentError(
            f"{name} must name keys for each of (batch, queries) = {(b, q_len)}, got shape "
            f"{tuple(indices.shape)}"
        )
    columns = -(-keys // size)
    table = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.bool, device=indices.device)
    table.scatter_(-1, torch.where(indices < 0, columns, indices.long()), True)
    return block_table(table[..., :columns].repeat_interleave(hq // heads, 1), (1, size))


def graph_mask(
    fn: Callable | None, shape: tuple, q_offset: Any, kv_offset: int, use_vmap: bool, device: Any,
    padding: Tensor | None,
) -> GraphMask:  # fmt: skip
    """Return a mask under `torch.compile`, where transformers' own functions cannot be traced."""
    from transformers import masking_utils as hf

    unpadded = None if padding is None else of_padding(padding)
    # A static cache's counter counts on in place, and masks are made where a layer asks for them.
    at = q_offset.clone() if isinstance(q_offset, Tensor) else q_offset
    later = lambda: intersection(_in_graph(fn, shape, at, kv_offset, use_vmap, device), unpadded)
    if fn is not hf.causal_mask_function or not isinstance(at, Tensor):
        return GraphMask(later, shape)
    lengths = (at + (shape[2] - kv_offset)).to(torch.int32).expand(shape[0]).contiguous()
    return GraphMask(later, shape, (intersection(causal(), unpadded), lengths))


def _in_graph(
    fn: Callable | None, shape: tuple, q_offset: Any, kv_offset: int, use_vmap: bool, device: Any
) -> MaskFn | None:
    """Return causal masks as a value, and all others as a bool square in the graph."""
    from transformers import masking_utils as hf

    if fn is None or fn is hf.bidirectional_mask_function:
        return None
    if fn is hf.causal_mask_function and not isinstance(q_offset, Tensor):
        return causal(q_offset - kv_offset)
    b, h, q, kv = (torch.arange(n, device=device) for n in shape)
    q, kv = q + q_offset, kv + kv_offset
    if use_vmap:
        square = hf._vmap_expansion_sdpa(fn)(b, h, q, kv)
    else:
        square = fn(b[:, None, None, None], h[:, None, None], q[:, None], kv)
    return dense(square.expand(shape))
