"""Tensors that the library makes itself, such as ALiBi's slopes for a number of heads.

They have no place of their own: a call brings them to the device of q, once, and the copy stays
with them. (Tensors that the user captures are the user's to place.)
"""

import torch
from torch import Tensor


def constant(t: Tensor) -> Tensor:
    """Mark a tensor that the library made and nobody writes to."""
    t.headway_copies = {}  # type: ignore[attr-defined]
    return t


def brought(t: Tensor, device: torch.device) -> Tensor:
    """A tensor, or if it is a constant elsewhere, its copy on the device."""
    if t.device == device:
        return t
    copies = getattr(t, "headway_copies", None)
    if copies is None:
        return t
    if torch.compiler.is_compiling():
        return t.to(device)
    if device not in copies:
        copies[device] = t.to(device)
    return copies[device]
