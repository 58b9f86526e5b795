"""Copies of the library's own tensors, such as ALiBi's slopes, on the devices of calls.

The first call on a device copies the tensor to it, and the copy is kept with the tensor. Tensors
that the user captures are not moved.
"""

import torch
from torch import Tensor


def constant(t: Tensor) -> Tensor:
    """Mark a tensor that the library made and that nobody modifies."""
    t.headway_copies = {}  # type: ignore[attr-defined]
    return t


def to_device_cached(t: Tensor, device: torch.device) -> Tensor:
    """Return a tensor, or the copy on the device of one that is marked as a constant."""
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
