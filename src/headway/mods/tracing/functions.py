"""Derivatives that a `torch.autograd.Function` defines.

Its forward runs under `no_grad`, so a trace alone would lose its backward. Where a function calls
one, it is traced again with symbols that require grad: autograd then shows which values a Function
made. Its backward runs on symbols as well, and a `tangent` node keeps what it computes.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .arrays import Array

if TYPE_CHECKING:
    from .tracer import Tracer


def is_unlinked(tracer: "Tracer", value: Any) -> bool:
    """Return whether a value is the result of an autograd Function whose backward is to be run."""
    return (
        tracer.is_symbol(value)
        and id(value) not in tracer.linked
        and isinstance(value.grad_fn, BackwardCFunction)
    )


def link(tracer: "Tracer", value: Tensor) -> None:
    """Give the result of an autograd Function the derivative that its backward computes."""
    tracer.linked.add(id(value))
    node: Any = value.grad_fn
    name = tracer.library_ops.get(id(value), f"{type(node).__name__.removesuffix('Backward')}")
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    inputs = [x for edge in edges if (x := _input(tracer, *edge)) is not None]
    if len(inputs) < len(edges) or value.dim():
        tracer.refuse(
            f"calls the autograd Function {name} for a vector, or on what the trace did not see",
            "call it on one number per pair, and return one",
        )
    for x in inputs:
        if is_unlinked(tracer, x):
            link(tracer, x)
    before = tracer.record_detach, tracer.linking
    tracer.record_detach, tracer.linking = False, True
    try:
        grads = [
            tracer.symbol(float(n == value.output_nr), output.dtype)
            for n, output in enumerate(node._input_metadata)
        ]
        with torch.no_grad():
            slopes = node.apply(*grads)
        slopes = slopes if isinstance(slopes, tuple) else (slopes,)
        slopes = [x for x, needed in zip(slopes, node.needs_input_grad, strict=False) if needed]
    except (RuntimeError, NotImplementedError) as error:
        tracer.refuse(f"calls {name}, whose derivative fails: {error}", "define its backward")
    finally:
        tracer.record_detach, tracer.linking = before
    result = tracer.value("detach", (tracer.arg(value),), value.dtype)
    for x, slope in zip(inputs, slopes, strict=True):
        if slope is None:
            continue
        numbers, parts = (tracer.cast(y, value.dtype) for y in (x, slope))
        indices = numbers.indices() if isinstance(numbers, Array) else [()]
        for index in indices:
            pair = (y.at(index) if isinstance(y, Array) else y for y in (numbers, parts))
            result = tracer.value("tangent", (result, *pair), value.dtype)
    tracer.bind(value, result)


def _input(tracer: "Tracer", node: Any, number: int) -> Tensor | None:
    """Return the tensor that is an output of a node of autograd, or a leaf."""
    if hasattr(node, "variable"):
        return node.variable
    for symbol in reversed(tracer.symbols):
        if symbol.grad_fn is node and symbol.output_nr == number:
            return symbol
    return None
