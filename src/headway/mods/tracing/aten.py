"""The calls of PyTorch's ops: their full names, and their arguments by name.

An op counts if every argument of the call is an operand, or has the default of its schema, or only
says where a number is stored. Unknown overloads and unknown arguments are refused. An op of another
library never counts as PyTorch's.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops import COMPARISONS, OPS
from .values import describe_value

if TYPE_CHECKING:
    from .tracer import Tracer

# PyTorch's name -> the graph's op, and the arguments that are its operands.
NAMES = {name: (graph_op, op.operands) for graph_op, op in OPS.items() for name in op.aten}
# Arguments that say where a number is stored, and do not change it.
_STORAGE_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})


class OpCall:
    """A call of an op, with its arguments by their names in its schema.

    - `name`: the op's, without the underscore of in-place ops.
    - `pending`: the arguments that the translation has not taken into account yet.
    """

    def __init__(
        self, tracer: "Tracer", func: Any, name: str, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self.tracer, self.func, self.name = tracer, func, name
        self.args, self.kwargs = args, kwargs
        schema = func._schema.arguments
        self.pending = dict(zip([a.name for a in schema], args, strict=False)) | kwargs
        self.defaults = {a.name: a.default_value for a in schema if a.has_default_value()}

    def has(self, names: tuple[str, ...]) -> bool:
        """Return whether all of them were passed and are still pending."""
        return all(name in self.pending for name in names)

    def take(self, name: str) -> Any:
        """Return the value of an argument, and take it into account."""
        return self.pending.pop(name, self.defaults.get(name))

    def unused(self) -> tuple[str, Any] | None:
        """Return a pending argument that may change the result, with its value; None if none."""
        for name, value in self.pending.items():
            default = self.defaults.get(name)
            if name not in _STORAGE_ARGUMENTS and value is not None and not _same(value, default):
                return name, value
        return None

    def on_samples(self) -> Tensor:
        """Return what the op makes of numbers; refuse an argument that was not accounted for."""
        self.refuse_unused()
        return self.func(
            *map(sample, self.args), **{n: sample(value) for n, value in self.kwargs.items()}
        )

    def dtype(self) -> torch.dtype:
        """Return the dtype of the result of an op that computes number by number."""
        result = self.on_samples()
        if result.numel() != 1:
            self.tracer.refuse(
                f"makes {tuple(result.shape)} numbers of one with {full_name(self.func)}",
                "compute one number per pair",
            )
        return result.dtype

    def refuse_unused(self) -> None:
        """Refuse a call with an argument that was not taken into account."""
        unused = self.unused()
        if unused is not None:
            name, value = unused
            value = describe_value(value) if isinstance(value, Tensor) else repr(value)
            self.tracer.refuse(
                f"calls {full_name(self.func)} with {name}={value}",
                "leave the argument out, or write what it does with arithmetic and torch.where",
            )

    def binary(self, op: str, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        common = dtype
        if op in COMPARISONS:
            common = torch.result_type(*map(sample, (a, b)))
        tracer = self.tracer
        return tracer.emit(op, (tracer.cast(a, common), tracer.cast(b, common)), dtype)


def _same(value: Any, default: Any) -> bool:
    return not isinstance(value, Tensor) and type(value) is type(default) and value == default


def full_name(func: Any) -> str:
    """Return the name of an op for messages: `gelu`, `round.decimals`, `acme::sigmoid`."""
    return func.name().removeprefix("aten::")


def sample(value: Any) -> Any:
    """Return a tensor of one number in place of a symbol, to compute a result's dtype.

    It has as many dimensions, on which dtypes depend. Meta tensors would do, but some ops on them
    load torch's compiler.
    """
    if isinstance(value, Tensor):
        return torch.ones((1,) * value.dim(), dtype=value.dtype, device="cpu")
    return type(value)(map(sample, value)) if isinstance(value, list | tuple) else value
