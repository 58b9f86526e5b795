"""The keys and values of the positions before, for decoding."""

from typing import Any

import torch
from torch import Tensor

from ..blocks import BlockMask
from ..errors import ArgumentError
from ..mods import (
    Mask,
    alibi,
    block_causal,
    causal,
    chunked,
    dilated,
    global_tokens,
    neighborhood,
    relative_bias,
    sliding_window,
    strided,
    t5_bias,
    tiled,
    window_bias,
)
from ..mods.base import Both, Either, Mod, Not, Then


class Past:
    """The keys and values `(b, heads, length, width)` of one layer at the positions before.

    Given to `Attention` or `MLA`, which add their own: new queries see all keys, the old ones
    first. Scores and masks number the new queries from 0 and the keys from the first old one, so
    that position i of the queries is position `i + past.length` of the keys: `causal(past.length)`.
    A function of the user's says so itself. Values of the library that compare the two positions
    and know of no past are refused: `causal()`, `sliding_window(8)`, `alibi(8)` and their like.
    """

    def __init__(self) -> None:
        self.keys_values: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return 0 if self.keys_values is None else self.keys_values[0].shape[2]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions, `(b, heads, new, width)`; returns the keys and values of all."""
        self.keys_values = self.extended(k, v)
        return self.keys_values

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all, these `(b, heads, new, width)` too, without keeping them."""
        if self.keys_values is None:
            return k, v
        past_k, past_v = self.keys_values
        return torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)


# Of the library's values, those that see how far a key is from its query, or where the query is.
# (`causal` has an offset. `dense`, `block_table` and `bias` have tensors of the call's sizes,
# `document` and `spans` ids of queries and of keys; the others see keys alone, or no position.)
_FROM_ZERO = (
    sliding_window, dilated, strided, chunked, block_causal, global_tokens, neighborhood, tiled,
    alibi, relative_bias, t5_bias, window_bias,
)  # fmt: skip


def length_of(past: Past | None) -> int:
    """How many positions come before."""
    if past is None:
        return 0
    if not isinstance(past, Past):
        raise ArgumentError(
            f"past must be a headway.nn.Past, one for each layer, got {type(past).__name__}"
        )
    return past.length


def check_positions(score: Any, mask: Any, length: int) -> None:
    """Refuse values of the library whose queries begin at 0 where `length` positions come before.

    A `causal(offset)` of 0 or less is one, unless another in the same mask has an offset:
    `causal(n) & ~causal(n - 8)` is a window, also where n is 8.
    """
    if not length:
        return
    if isinstance(mask, BlockMask):
        mask = mask.mask
    parts = [*_parts(score), *_parts(mask)]
    placed = any(isinstance(part, causal) and part.offset > 0 for part in parts)
    for part in parts:
        if isinstance(part, _FROM_ZERO) or (isinstance(part, causal) and not placed):
            raise ArgumentError(
                f"{part!r} takes the first of these queries for position 0, but past holds "
                f"{length} positions before it; {_way(part)}"
            )


def _parts(mod: Any) -> list[Any]:
    """The values in a score or mask that combine nothing themselves, and the functions."""
    if not isinstance(mod, Both | Either | Not | Then):
        return [mod]
    return [part for name in mod.fields for part in _parts(getattr(mod, name))]


def _way(part: Mod) -> str:
    """What says the same of queries that follow a past."""
    if isinstance(part, causal):
        return f"write causal(past.length{f' - {-part.offset}' if part.offset else ''})"
    if isinstance(part, sliding_window):
        w = part.window
        return (
            f"with n = past.length, causal() & {part!r} is causal(n) & ~causal(n - {w}), and "
            f"{part!r} is causal(n + {w - 1}) & ~causal(n - {w})"
        )
    takes = "b, h, i, j" if isinstance(part, Mask) else "s, b, h, i, j"
    return (
        f"write a function that moves the queries: lambda {takes}: mod("
        f"{takes.replace('i,', 'i + n,')}), with mod = {part!r} and n = torch.tensor(past.length)"
    )
