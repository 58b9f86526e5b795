"""The keys and values of the positions before, for decoding."""

from typing import Any

import torch
from torch import Tensor

from ..arguments import check_global
from ..blocks import BlockMask
from ..errors import ArgumentError
from ..inference import Layer


class Past:
    """The keys and values of one layer at earlier positions, `(b, heads, length, width)`.

    Pass it to `Attention` or `MLA`, which append theirs. New queries continue its positions and see
    all keys, the earlier ones first. The score and mask of training work unchanged: `causal()`,
    `alibi(8)`, your function.

    Gradients pass through the past. While they are recorded, every step copies it; otherwise it has
    spare room, which doubles when it is full.
    """

    def __init__(self) -> None:
        self.length = 0  # how many positions it holds
        self._room: tuple[Tensor, Tensor] | None = None  # (b, heads, capacity, width)

    @property
    def keys_values(self) -> tuple[Tensor, Tensor] | None:
        """The keys and values of all positions; None if there are none."""
        if self._room is None:
            return None
        k, v = self._room
        return k[:, :, : self.length], v[:, :, : self.length]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions, `(b, heads, new, width)`, and return all keys and values."""
        self.keep(*self.extended(k, v), self.length + k.shape[2])
        keys_values = self.keys_values
        assert keys_values is not None
        return keys_values

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the old and the new keys and values, the new ones `(b, heads, new, width)`, at the
        start of `(b, heads, capacity, width)`. `keep` stores them."""
        total = self.length + k.shape[2]
        if self._room is None:
            return k, v
        plain = type(k) is type(v) is Tensor and not torch.compiler.is_compiling()
        if torch.is_grad_enabled() or not plain or not self._like(k, v):
            old = self.keys_values
            assert old is not None
            return torch.cat((old[0], k), dim=2), torch.cat((old[1], v), dim=2)
        room = self._room
        if total > room[0].shape[2] or any(x.requires_grad for x in room):
            with torch.inference_mode(False):  # written to in any mode
                larger_room = [x.new_empty(*x.shape[:2], 2 * total, x.shape[3]) for x in room]
            for to, x in zip(larger_room, room, strict=True):
                to[:, :, : self.length] = x[:, :, : self.length]
            room = larger_room[0], larger_room[1]
        for to, x in zip(room, (k, v), strict=True):
            to[:, :, self.length : total] = x
        return room

    def _like(self, k: Tensor, v: Tensor) -> bool:
        """Return whether new keys and values have the dtype, batch, heads and width of the old."""
        assert self._room is not None
        return all(
            x.dtype == y.dtype and x.shape[:2] == y.shape[:2] and x.shape[3] == y.shape[3]
            for x, y in zip(self._room, (k, v), strict=True)
        )

    def keep(self, k: Tensor, v: Tensor, length: int) -> None:
        """Store what `extended` returned, `(b, heads, capacity, width)`, with `length` valid
        positions."""
        self._room, self.length = (k, v), length


def length_of(past: Any) -> int:
    """Return how many positions the past holds."""
    if past is None:
        return 0
    if not isinstance(past, Past):
        raise ArgumentError(
            f"past must be a headway.nn.Past, one for each layer, or a layer of a cache of "
            f"headway.inference, got {type(past).__name__}"
        )
    return past.length


def positions_of(past: "Past | Layer | None", length: int, device: torch.device) -> Tensor:
    """The positions of `length` new tokens, `(length,)` or, of a cache's rows, `(b, length)`."""
    if isinstance(past, Layer):
        return past.positions(length)
    start = length_of(past)
    return torch.arange(start, start + length, device=device)


def check_past(mask: Any, past: "Past | Layer") -> None:
    """Positions are global wherever there is a past."""
    check_global(mask)
    if isinstance(past, Past) and past.length and isinstance(mask, BlockMask):
        raise ArgumentError(
            f"a block mask of q_len={mask.shape[2]} takes the first of these queries for position "
            f"0, but past holds {past.length} positions before it; pass its mask, {mask.mask!r}"
        )
