"""Map ops of PyTorch to ops of a graph, by full name and by all of their arguments.

An op whose name is in `OPS` is an op of a graph if every argument of the call is an operand, or has
the default of its schema, or only says where a number is stored. Unknown overloads and unknown
arguments are refused. An op of another library never counts as PyTorch's.
"""

from typing import Any

import torch
from torch import Tensor

from ..graph import BINARY, UNARY

# aten's names where they differ from the graph's.
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

# aten's name -> the graph's op, and the arguments that are its operands.
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
_SHAPE_ARGUMENTS = frozenset({"size", "shape", "dim", "implicit", "other"})
# Arguments that say where a number is stored, and do not change it.
_STORAGE_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
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
    """The arguments of one call of an op, by their names in its schema.

    `pending` are those that the translation has not taken into account yet.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = func._schema.arguments
        self.pending = dict(zip([a.name for a in schema], args, strict=False)) | kwargs
        self.defaults = {a.name: a.default_value for a in schema if a.has_default_value()}

    def has(self, names: tuple[str, ...]) -> bool:
        """Return whether all of them were passed and are still pending."""
        return all(name in self.pending for name in names)

    def take(self, name: str) -> Any:
        """Return the value of an argument, and take it into account."""
        return self.pending.pop(name, self.defaults.get(name))

    def take_shape(self) -> None:
        """Take the arguments that shape a result of one number into account."""
        for name in _SHAPE_ARGUMENTS & self.pending.keys():
            del self.pending[name]

    def unused(self) -> tuple[str, Any] | None:
        """Return a pending argument that may change the result, with its value; None if none."""
        for name, value in self.pending.items():
            default = self.defaults.get(name)
            if name not in _STORAGE_ARGUMENTS and value is not None and not _same(value, default):
                return name, value
        return None


def _same(value: Any, default: Any) -> bool:
    return not isinstance(value, Tensor) and type(value) is type(default) and value == default


def full_name(func: Any) -> str:
    """Return the name of an op for messages: `gelu`, `round.decimals`, `acme::sigmoid`."""
    return func.name().removeprefix("aten::")


def sample(value: Any) -> Any:
    """Return a 0-d tensor with data in place of a symbol, to compute a result's dtype and shape.

    Meta tensors would do, but some ops on them load torch's compiler.
    """
    if isinstance(value, Tensor):
        return torch.ones((), dtype=value.dtype, device="cpu")
    return type(value)(map(sample, value)) if isinstance(value, list | tuple) else value
