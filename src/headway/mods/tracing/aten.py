"""Which op of a graph an op of PyTorch is: by its full name and by all of its arguments.

An op whose name is in `OPS` is an op of ours if every argument of the call is one of our operands,
or has the default of its schema, or only says where a number lies. So an unknown overload, or an
unknown argument of a known one, is refused. An op of another library never counts as PyTorch's.
"""

from typing import Any

import torch
from torch import Tensor

from ..graph import BINARY, UNARY

# aten's names where they differ from ours.
_RENAMED = {
    "not": ("logical_not",),
    "invert": ("bitwise_not",),
    "sign": ("sign", "sgn"),
    "mod": ("remainder",),
    "floordiv": ("floor_divide",),
    "truncdiv": (),
    "max": ("maximum", "clamp_min"),
    "min": ("minimum", "clamp_max"),
    "and": ("bitwise_and",),
    "or": ("bitwise_or",),
    "xor": ("bitwise_xor",),
    "shl": ("bitwise_left_shift", "__lshift__"),
    "shr": ("bitwise_right_shift", "__rshift__"),
    "detach": (),
}
_OPERANDS = {
    "pow": ("self", "exponent"),
    "clamp_min": ("self", "min"),
    "clamp_max": ("self", "max"),
}

# aten's name -> our op, and the arguments that are its operands.
OPS = {
    name: (op, _OPERANDS.get(name, ("self", "other") if op in BINARY else ("self",)))
    for op in (*UNARY, *BINARY)
    for name in _RENAMED.get(op, (op,))
}
# On one number these return it unchanged, whatever shape they are asked for, if it has one number.
IDENTITY = frozenset(
    "alias clone lift_fresh lift_fresh_copy view reshape _unsafe_view expand expand_as "
    "squeeze unsqueeze contiguous positive".split()
)
_SHAPES = frozenset({"size", "shape", "dim", "implicit", "other"})
# They say where a number lies, and not which it is.
_PLACES = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
CREATION = {
    "zeros_like": 0,
    "ones_like": 1,
    "zeros": 0,
    "ones": 1,
    "new_zeros": 0,
    "new_ones": 1,
    "_efficientzerotensor": 0,
}
FILLED = ("full_like", "new_full", "full")


class Arguments:
    """The arguments of one call of an op by their names in its schema."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = func._schema.arguments
        self.given = dict(zip([a.name for a in schema], args, strict=False)) | kwargs
        self.defaults = {a.name: a.default_value for a in schema if a.has_default_value()}

    def has(self, names: tuple[str, ...]) -> bool:
        """Whether all of them were given."""
        return all(name in self.given for name in names)

    def take(self, name: str) -> Any:
        """The value of an argument, which has then been taken into account."""
        return self.given.pop(name, self.defaults.get(name))

    def shape(self) -> None:
        """Take what shapes one number."""
        for name in _SHAPES & self.given.keys():
            del self.given[name]

    def left(self) -> tuple[str, Any] | None:
        """An argument that nobody has taken and that may change the result, with its value."""
        for name, value in self.given.items():
            default = self.defaults.get(name)
            if name not in _PLACES and value is not None and not _same(value, default):
                return name, value
        return None


def _same(value: Any, default: Any) -> bool:
    return not isinstance(value, Tensor) and type(value) is type(default) and value == default


def full_name(func: Any) -> str:
    """As messages name an op: `gelu`, `round.decimals`, `acme::sigmoid`."""
    return func.name().removeprefix("aten::")


def sample(value: Any) -> Any:
    """A real 0-d tensor in place of a symbol, to ask torch for a result's dtype and shape. (Ops on
    meta tensors would do, but some of them load torch's compiler.)"""
    if isinstance(value, Tensor):
        return torch.ones((), dtype=value.dtype, device="cpu")
    return type(value)(map(sample, value)) if isinstance(value, list | tuple) else value
