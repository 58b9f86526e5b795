"""Run a user's score or mask function once, on symbols, and write down what it did: a `Graph`.

A dispatch mode (`tracer.py`) records the ops, and a function mode turns
`table[h, q_idx - kv_idx]` into a gather.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import ModError
from ...surroundings import alone
from ..graph import DTYPE_NAMES, POSITIONS, Arg, Graph, Input
from .call_recorder import Watch
from .locations import place_in_traceback, quote
from .tracer import Tracer, describe_value

# What may be asked of a captured tensor: its sizes, and what is part of its type.
_SIZES = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__,
    torch.numel, Tensor.shape, Tensor.ndim, Tensor.nbytes,
}  # fmt: skip
_TYPES = {
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex,
    Tensor.element_size, Tensor.get_device, Tensor.dtype, Tensor.device, Tensor.is_cuda,
    Tensor.is_cpu, Tensor.itemsize, Tensor.layout, Tensor.requires_grad,  # pyrefly: ignore[missing-attribute]
}  # fmt: skip
# These read memory, past the modes that keep symbols apart from numbers.
_MEMORY = {
    Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage,
    Tensor.__dlpack__, Tensor.__repr__, Tensor.__format__,
}  # fmt: skip


class _Indexing(TorchFunctionMode):
    """`captured[symbols]` would read numbers out of the symbols; make it a gather instead. And what
    Python learns of a captured tensor is noted."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            table, index = args[0], args[1]
            items = index if isinstance(index, tuple) else (index,)
            captured = self.tracer.knows(table) or self.tracer.is_captured(table)
            if captured or any(map(self.tracer.knows, items)):
                if id(table) in self.tracer._args:
                    self.tracer.refuse(
                        "indexes a value that is one number", "index captured tensors only"
                    )
                return self.tracer.gather(table, index)
        if getattr(func, "__name__", "") in ("__set__", "detach_") and self.tracer.knows(args[0]):
            self.tracer.refuse("changes an attribute of a value in place", "use x = x.detach()")
        if func is torch.nn.functional.embedding:
            self.tracer.refuse("calls embedding", "index the table: table[idx, h]")
        if func in _MEMORY:
            if any(map(self.tracer.knows, args)):
                self.tracer.refuse_decision()
            with _disable_current_modes():
                result = func(*args, **kwargs)
        else:
            result = self.tracer.call(func, args, kwargs)
        if not isinstance(result, Tensor):
            self.note(func, args)
        return result

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Python got something that is not a tensor."""
        captured = [x for x in args if self.tracer.is_captured(x)]
        if not captured:
            return
        if getattr(func, "__name__", "") == "__get__":
            func = func.__self__
        if func in _SIZES:
            self.tracer.sized += captured
        elif func not in _TYPES:
            self.tracer.reads_value()


class Trace(NamedTuple):
    """What tracing found.

    - `captured`: the tensors that the graph's inputs t0, t1, ... stand for.
    - `value_read`: where Python read a captured tensor's value, which is now part of the graph.
    - `sized`: the captured tensors of which it read the shape.
    """

    graph: Graph
    captured: list[Tensor]
    value_read: str | None
    sized: list[Tensor]


def trace(
    kind: str,
    fn: Callable[..., Tensor],
    dtype: torch.dtype,
    numbers: Callable[[Tracer], Callable[..., Tensor]] | None = None,
    watch: Watch | None = None,
    as_called: bool = False,
) -> Trace:
    """Trace `fn` as a score or a mask.

    **Arguments:**

    - `kind`: "score" (`fn(score, b, h, q_idx, kv_idx)`) or "mask" (`fn(b, h, q_idx, kv_idx)`).
    - `dtype`: of the score, float32 or float64.
    - `numbers`: given the tracer, adds run-time numbers as inputs and returns the function to run.
    - `watch`: looks on while the function runs.
    - `as_called`: it asks torch for what surrounds it, so the caller's grad mode, autocast,
      inference mode and default device stay. Its graph is then for this call alone.

    **Raises:** `ModError`, naming the user's file, line and op.
    """
    learning = torch.is_grad_enabled()
    grad = learning or not as_called
    tracer = Tracer(f"{kind} function {_name(fn)}", cuts=kind == "score" and grad)
    code = getattr(fn, "__code__", None)
    tracer.place = (code.co_filename, code.co_firstlineno) if code else None
    with alone(as_called), torch.set_grad_enabled(grad):
        values = [tracer.add_input("score", DTYPE_NAMES[dtype])] if kind == "score" else []
        values += [tracer.add_input(name, "i64") for name in POSITIONS]
        run = fn if numbers is None else numbers(tracer)
        tracer.outer = trace.__code__
        try:
            with tracer, _Indexing(tracer), watch or nullcontext():
                result = run(*values)
        except ModError:
            raise
        except Exception as error:
            raise ModError(_failed(kind, tracer, error)) from error
        finally:
            tracer.outer = None
        if watch is not None and (watch.applied or (watch.blind and tracer.cut_by_mode)):
            raise ModError(
                f"the {tracer.what} calls a torch.autograd.Function, whose backward would be lost "
                "(or uses torch.no_grad while a profiler runs, when it cannot be told from one); "
                "write the derivative with detach: x + (f(x) - x).detach() has the value of f and "
                f"the derivative of x{watch.applied or quote(tracer.place)}"
            )
        if watch is not None and watch.hooked and kind == "score" and learning:
            raise ModError(
                f"the {tracer.what} calls a module with a backward hook, which would be lost; "
                "remove the hook, write its effect with detach: x + (f(x) - x).detach() has the "
                f"value of f and the derivative of x, or call under torch.no_grad(){watch.hooked}"
            )
        output = _output(tracer, kind, result, dtype)
    tensors = tuple(
        Input(f"t{n}", DTYPE_NAMES[t.dtype], t.dim()) for n, t in enumerate(tracer.captured)
    )
    graph = tracer.builder.finish(kind, (*tracer.inputs, *tensors), (output,))
    return Trace(graph, tracer.captured, tracer.value_read, tracer.sized)


def _failed(kind: str, tracer: Tracer, error: Exception) -> str:
    """The message for an error inside the function, or already in the call of it."""
    place, takes = place_in_traceback(error), ", ".join(POSITIONS)
    if isinstance(error, TypeError) and place is None:
        other = "mask" if kind == "score" else "score"
        return (
            f"the {tracer.what} cannot be called as a {kind}: {error}; a score takes (score, "
            f"{takes}), a mask ({takes}): if it is a {other}, pass it as {other}="
            f"{quote(tracer.place)}"
        )
    takes = f"score, {takes}" if kind == "score" else takes
    return (
        f"the {tracer.what} failed on symbols: {type(error).__name__}: {error}; it must "
        f"take {takes} (each one number) and return one number{quote(place or tracer.place)}"
    )


def _output(tracer: Tracer, kind: str, result: Any, dtype: torch.dtype) -> Arg:
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
        tracer.refuse(f"returned {describe_value(result)}", "return the new score")
    if isinstance(result, Tensor) and result.dtype == torch.bool:
        tracer.refuse("returned a boolean", "return the new score; pass a mask as mask=")
    return tracer._cast(result, dtype)


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
