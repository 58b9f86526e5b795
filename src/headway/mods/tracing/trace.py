"""Trace a user's score or mask function to a `Graph`: run it once, on symbols, and record its ops.

A dispatch mode (`tracer.py`) records the ops, and a function mode turns
`table[h, q_idx - kv_idx]` into a gather. PyTorch's own tracer, `make_fx`, takes 100 times as long
and refuses 0-d tensors that index a table.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import ModError
from ...surroundings import isolated
from ..graph import DTYPE_NAMES, POSITIONS, Arg, Graph, Input
from ..mod import show
from .call_recorder import CallRecorder
from .functions import is_unlinked, link
from .locations import file_owner, location_in_traceback, quote
from .tracer import Tracer
from .values import describe_value, flatten_arguments

# Queries that a captured tensor answers by its sizes, and by its type.
_SIZE_QUERIES = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__,
    torch.numel, Tensor.shape, Tensor.ndim, Tensor.nbytes,
}  # fmt: skip
_TYPE_QUERIES = {
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex,
    Tensor.element_size, Tensor.get_device, Tensor.dtype, Tensor.device, Tensor.is_cuda,
    Tensor.is_cpu, Tensor.itemsize, Tensor.layout, Tensor.requires_grad,  # pyrefly: ignore[missing-attribute]
}  # fmt: skip
# What these say of a value that the function computes depends on the call.
_UNKNOWN_OF_SYMBOLS = {
    getattr(Tensor, name)
    for name in "requires_grad grad_fn grad is_leaf is_cuda is_cpu is_meta is_inference _version "
    "_base".split()
}  # fmt: skip
# These read memory, below the modes that tell symbols from numbers.
_MEMORY_READS = {
    Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage,
    Tensor.__dlpack__, Tensor.__repr__, Tensor.__format__,
}  # fmt: skip
# These change what autograd does with a tensor, below the modes or without an op.
_CHANGES = {"__set__", "detach_", "requires_grad_", "register_hook", "retain_grad", "backward"}


class _Indexing(TorchFunctionMode):
    """A function mode that turns `captured[symbols]` into a gather.

    It also notes which properties of captured tensors Python reads.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        kwargs = kwargs or {}
        if self.tracer.translating:
            return func(*args, **kwargs)
        if self.tracer.gradients:
            for value in flatten_arguments(args, kwargs):
                if is_unlinked(self.tracer, value):
                    link(self.tracer, value)
        if func is Tensor.__getitem__:
            table, index = args[0], args[1]
            items = index if isinstance(index, tuple) else (index,)
            tensors = table, *flatten_arguments(items, {})
            if any(self.tracer.is_symbol(x) or self.tracer.is_captured(x) for x in tensors):
                return self.tracer.index(table, index)
        name = getattr(func, "__name__", "")
        if func is Tensor.__setitem__ and any(
            self.tracer.is_symbol(x) or self.tracer.is_captured(x) for x in args
        ):
            whose = "a captured tensor" if self.tracer.is_captured(args[0]) else "a tensor"
            self.tracer.refuse(f"assigns to elements of {whose}", "use torch.stack or torch.where")
        if name.partition(".")[0] in _CHANGES and self.tracer.is_symbol(args[0]):
            self.tracer.refuse("changes an attribute of a value in place", "use x = x.detach()")
        if func is torch.nn.functional.embedding:
            self.tracer.refuse("calls embedding", "index the table: table[idx, h]")
        if func in _MEMORY_READS:
            if any(map(self.tracer.is_symbol, args)):
                self.tracer.refuse_decision()
            with _disable_current_modes():
                result = func(*args, **kwargs)
        elif func is Tensor.new_tensor:
            with _disable_current_modes():
                kwargs = {"dtype": args[0].dtype, "device": "cpu"} | kwargs
                result = self.tracer.note_own(torch.tensor(*args[1:], **kwargs))
        else:
            self.tracer.written = name
            result = self.tracer.call(func, args, kwargs)
        if not isinstance(result, Tensor):
            self.note_query(func, args)
        return result

    def note_query(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note that Python read a property of a captured tensor that is not a tensor itself."""
        captured = [x for x in args if self.tracer.is_captured(x)]
        symbols = [x for x in args if self.tracer.is_symbol(x)]
        self.tracer.note_shape(*(self.tracer.values[id(x)] for x in symbols))
        if getattr(func, "__name__", "") == "__get__":
            func = func.__self__
        asker = sys._getframe(2).f_code.co_filename  # PyTorch's own code may ask
        if symbols and func in _UNKNOWN_OF_SYMBOLS and file_owner(asker) != "internal":
            self.tracer.refuse(
                f"asks a value that it computes for {func.__name__}, which is not known in a trace",
                "ask a captured tensor, or torch.is_grad_enabled()",
            )
        if not captured:
            return
        if func in _SIZE_QUERIES:
            self.tracer.shape_read += captured
        elif func not in _TYPE_QUERIES:
            self.tracer.note_value_read()


class Observed(tuple):
    """T and a number of the pair, whose mean under P is a result of the forward: what a score of
    the library may return. (A NamedTuple is made by a function that no name leads to.)"""

    __slots__ = ()


class Trace(NamedTuple):
    """A traced function.

    - `captured`: the tensors that the graph's inputs t0, t1, ... stand for.
    - `value_read`: the line where Python read a captured tensor's value, which the graph now holds
      as a constant; None if there is none.
    - `shape_read`: the captured tensors whose shape Python read.
    """

    graph: Graph
    captured: list[Tensor]
    value_read: str | None
    shape_read: list[Tensor]


def trace(
    kind: str,
    fn: Callable[..., Tensor],
    dtype: torch.dtype,
    numbers: Callable[[Tracer], Callable[..., Tensor]] | None = None,
    recorder: CallRecorder | None = None,
    as_called: bool = False,
    gradients: bool = False,
) -> Trace:
    """Trace `fn` as a score or a mask.

    **Arguments:**

    - `kind`: "score" (`fn(score, b, h, q_idx, kv_idx)`) or "mask" (`fn(b, h, q_idx, kv_idx)`).
    - `dtype`: of the score, float32 or float64.
    - `numbers`: given the tracer, adds run-time numbers as inputs and returns the function to run.
    - `recorder`: records the calls while the function runs.
    - `as_called`: keep the caller's grad mode, autocast, inference mode and default device, since
      the function queries them. The graph is then valid for this call isolated.
    - `gradients`: keep the backward of autograd Functions that it calls (`functions.py`).

    **Raises:** `ModError`, naming the user's file, line and op.
    """
    grad_enabled = torch.is_grad_enabled()
    grad = grad_enabled or not as_called
    tracer = Tracer(f"{kind} function {show(fn)}", kind == "score" and grad, gradients)
    code = getattr(fn, "__code__", None)
    tracer.location = (code.co_filename, code.co_firstlineno) if code else None
    with isolated(as_called), torch.set_grad_enabled(grad):
        values = [tracer.add_input("score", DTYPE_NAMES[dtype])] if kind == "score" else []
        values += [tracer.add_input(name, "i64") for name in POSITIONS]
        if gradients:
            values[0].requires_grad_()
            with tracer:
                values[0] = values[0].clone()  # no leaf, which may not be changed in place
        run = fn if numbers is None else numbers(tracer)
        tracer.outer = trace.__code__
        try:
            with tracer, _Indexing(tracer), recorder or nullcontext():
                result = run(*values)
            results = result if isinstance(result, Observed) else (result,)
            for value in results:
                if gradients and is_unlinked(tracer, value):
                    with tracer:
                        link(tracer, value)
        except ModError:
            raise
        except Exception as error:
            raise ModError(_error_message(kind, tracer, error)) from error
        finally:
            tracer.outer = None
        if kind == "score" and grad and not gradients:
            calls = recorder is not None and (
                recorder.autograd_function
                or (recorder.profiler_active and tracer.no_grad_used)  # no calls were seen
            )
            if calls or tracer.needs_gradients:
                return trace(kind, fn, dtype, numbers, recorder, as_called, gradients=True)
        if recorder is not None and recorder.hooked_module and kind == "score" and grad_enabled:
            raise ModError(
                f"the {tracer.subject} calls a module with a backward hook, which would be lost; "
                "remove the hook, write its effect with detach: x + (f(x) - x).detach() has the "
                "value of f and the derivative of x, or call under torch.no_grad()"
                f"{recorder.hooked_module}"
            )
        names = ("the new score", "one number")
        outputs = tuple([
            _output(tracer, kind, value, dtype, name)
            for value, name in zip(results, names, strict=False)
        ])  # fmt: skip
    tensors = tuple(
        Input(f"t{n}", DTYPE_NAMES[t.dtype], t.dim()) for n, t in enumerate(tracer.captured)
    )
    graph = tracer.builder.finish(kind, (*tracer.inputs, *tensors), outputs)
    return Trace(graph, tracer.captured, tracer.value_read, tracer.shape_read)


def _error_message(kind: str, tracer: Tracer, error: Exception) -> str:
    """Return the message for an error inside the function, or in the call of it."""
    location, takes = location_in_traceback(error), ", ".join(POSITIONS)
    if isinstance(error, TypeError) and location is None:
        other = "mask" if kind == "score" else "score"
        return (
            f"the {tracer.subject} cannot be called as a {kind}: {error}; a score takes (score, "
            f"{takes}), a mask ({takes}): if it is a {other}, pass it as {other}="
            f"{quote(tracer.location)}"
        )
    takes = f"score, {takes}" if kind == "score" else takes
    return (
        f"the {tracer.subject} failed on symbols: {type(error).__name__}: {error}; it must "
        f"take {takes} (each one number) and return one number{quote(location or tracer.location)}"
    )


def _output(tracer: Tracer, kind: str, result: Any, dtype: torch.dtype, name: str) -> Arg:
    if kind == "mask":
        if isinstance(result, bool):
            return result
        if not isinstance(result, Tensor) or result.dtype != torch.bool:
            tracer.refuse(
                f"returned {describe_value(result)}",
                "return a boolean: compare positions (q_idx >= kv_idx), combine with & | ~",
            )
        return tracer.arg(result)
    if isinstance(result, bool) or not isinstance(result, Tensor | int | float):
        tracer.refuse(f"returned {describe_value(result)}", f"return {name}")
    if isinstance(result, Tensor) and result.dtype == torch.bool:
        tracer.refuse("returned a boolean", "return the new score; pass a mask as mask=")
    tracer.arg(result)  # one number
    return tracer.cast(result, dtype)  # type: ignore[return-value]
