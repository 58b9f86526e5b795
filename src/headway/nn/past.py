"""The keys and values of the positions before, for decoding."""

import torch
from torch import Tensor


class Past:
    """The keys and values `(b, heads, length, width)` of one layer at the positions before."""

    def __init__(self) -> None:
        self.keys_values: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return 0 if self.keys_values is None else self.keys_values[0].shape[2]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions; returns the keys and values of all."""
        if self.keys_values is not None:
            k = torch.cat((self.keys_values[0], k), dim=2)
            v = torch.cat((self.keys_values[1], v), dim=2)
        self.keys_values = k, v
        return k, v
