"""Values that a trace meets."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def as_constant(value: Any, dtype: torch.dtype) -> Any:
    """Return a constant as Python's number of a dtype: `1` of a bool tensor is True."""
    if isinstance(value, Tensor):
        return value
    return value != 0 if dtype == torch.bool else float(value) if dtype.is_floating_point else value


def describe_value(value: Any) -> str:
    """Return a value as messages show it."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return f"{type(value).__name__} {value!r}"


def flatten_arguments(args: tuple, kwargs: dict) -> Iterator[Any]:
    """Yield all arguments of a call, and the items of those that are lists."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, list | tuple):
            yield from arg
        else:
            yield arg
