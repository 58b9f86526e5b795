"""Lower values and functions to graphs, and cache the graphs.

`describe` takes a value (or a bare function) apart into its structure, a string, and its
ingredients; `lower` traces the structure to a `Graph`, and finds the tensors that its functions
capture. A cached graph is reused only if all that its trace read is known to be unchanged
(`tracing.capture`, `tracing.call_recorder`); a function with an opaque read is traced at every
call. A trace takes 0.16 to 0.24 ms (`make_fx`: 12 to 25 ms).
"""

import dataclasses
import functools
import operator
import time
import types
from collections.abc import Callable
from functools import lru_cache
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..caches import LRUCache
from ..errors import HeadwayError, ModError
from ..types import Captured, constant_under_compile, fixed
from .base import Mod
from .graph import DTYPE_NAMES, DTYPES, Graph, Input, parse
from .tracing.call_recorder import CallRecorder
from .tracing.capture import FunctionReads, aliasing_pattern, collect_reads
from .tracing.guards import Guard, Path, guard_holds, resolve_path
from .tracing.trace import trace
from .tracing.tracer import Tracer

_MANY_READS = 300  # values: comparing them takes longer than the rest of a call on the host
# From PyTorch 2.13 on, Dynamo guards the attributes of classes and takes methods for constants.
GUARDS_CLASSES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class Parts(NamedTuple):
    """A score or mask taken apart: its structure as text, and its ingredients in order."""

    structure: str
    functions: list[Callable]
    tensors: list[Tensor]
    ints: list[int]
    floats: list[float]


def describe(mod: Callable) -> Parts:
    """Take a value or a function apart."""
    structure, functions, captured = take_apart(mod)
    return Parts(structure, functions, *captured)


def take_apart(mod: Callable) -> tuple[str, list[Callable], Captured]:
    """Return its structure, the functions in it, and the tensors and numbers of its values.

    Plain code that Dynamo can trace. Dynamo guards all that it reads, so it reads little.
    """
    functions: list[Callable] = []
    captured = Captured([], [], [])
    return _structure(mod, functions, captured), functions, captured


def parts_of(mod: Callable) -> Parts:
    """Return `describe(mod)`, cached on the value; not for use under `torch.compile`.

    The fields of a value never change. The dtype of a tensor may: the structure holds the first.
    """
    if not (isinstance(mod, Mod) and mod.of_library):
        return Parts("f", [mod], [], [], [])
    parts = mod.__dict__.get("parts")
    if parts is None:
        parts = mod.__dict__["parts"] = describe(mod)
    return parts


# Constants: `int | float` makes a new type wherever it is evaluated, here at every call.
_INTS, _FLOATS, _LITERALS = (int, torch.SymInt), (float, torch.SymFloat), (bool, str)


def _structure(item: Any, functions: list[Callable], captured: Captured) -> str:
    if isinstance(item, Mod) and item.of_library:
        inner = [_structure(getattr(item, name), functions, captured) for name in item.fields]
        return type(item).__name__ + "(" + ",".join(inner) + ")"
    if type(item) is int:
        captured.ints.append(item)
        return "n"
    if isinstance(item, tuple):
        return "(" + ",".join([_structure(part, functions, captured) for part in item]) + ")"
    if isinstance(item, Tensor):
        captured.tensors.append(item)
        return "t:" + DTYPE_NAMES[item.dtype] + ":" + str(item.dim())
    if item is None or isinstance(item, _LITERALS):
        return repr(item)
    if isinstance(item, _INTS):
        captured.ints.append(item)  # type: ignore[arg-type]
        return "n"
    if isinstance(item, _FLOATS):
        captured.floats.append(item)  # type: ignore[arg-type]
        return "x"
    if type(item) is functools.partial and _is_plain(item):
        arguments = [_constant(arg, captured) for arg in item.args]
        arguments += [name + "=" + _constant(arg, captured) for name, arg in item.keywords.items()]
        inner = _structure(item.func, functions, captured)
        return "partial(" + ",".join([inner, *arguments]) + ")"
    functions.append(item)
    return "f"


_PLAIN = int, float, bool, type(None), torch.SymInt, torch.SymFloat


def _is_plain(item: functools.partial) -> bool:
    """Return whether a partial is to be taken apart into a function, tensors and plain numbers.

    Only in code that `torch.compile` traces, where the partial itself cannot be read. Elsewhere it
    is followed as a function.
    """
    if not torch.compiler.is_compiling():
        return False
    for arg in (*item.args, *item.keywords.values()):
        if not isinstance(arg, Tensor) and type(arg) not in _PLAIN:
            return False
    return True


def _constant(item: Any, captured: Captured) -> str:
    """Return the structure of an argument of a `functools.partial`.

    Numbers become part of the formula. Tensors are captured with their shape, which the function
    may read.
    """
    if not isinstance(item, Tensor):
        if isinstance(item, _INTS) and not isinstance(item, bool):
            item = operator.index(item)  # `dynamic=True` makes symbols of numbers
        elif isinstance(item, _FLOATS):
            item = fixed(item)
        return "c:" + repr(item)
    captured.tensors.append(item)
    return "T:" + DTYPE_NAMES[item.dtype] + ":" + "x".join([str(size) for size in item.shape])


class Lowered(NamedTuple):
    """A traced score or mask.

    - `text`: the graph's text. Its inputs are the library's tensors, then the functions'.
    - `capture_sources`: (function, index among the tensors it can read) of each captured tensor.
    - `shape_sources`: the sources of tensors whose shape the functions read.
    - `capture_paths`, `guards`: (function, path) of each captured tensor, and (function, guard) of
      everything else that is read, for `torch.compile`.
    - `retrace_reason`: why it has to be traced at every call, with the line; None if it need not.
    """

    text: str
    capture_sources: tuple[tuple[int, int], ...] = ()
    shape_sources: tuple[tuple[int, int], ...] = ()
    capture_paths: tuple[tuple[int, Path], ...] = ()
    guards: tuple[tuple[int, Guard], ...] = ()
    retrace_reason: str | None = None


_lowered: LRUCache[Lowered] = LRUCache(1024)


def lower(
    kind: str, structure: str, dtype: str, *functions: Callable
) -> tuple[Lowered, list[Tensor]]:
    """Return the graph of a structure, and the tensors that its functions capture.

    One trace serves all values of its numbers and tensors, if everything else that the trace read
    is unchanged.
    """
    default = torch.get_default_dtype()  # the dtype of `0.1 * q_idx`
    if not functions:
        return _lower_library(kind, structure, dtype, default), []
    reads = [collect_reads(fn) for fn in functions]
    key = (kind, structure, dtype, default, aliasing_pattern(reads), *(tuple(r.key) for r in reads))
    opaque_read = _first_opaque_read(reads)
    if opaque_read is None:
        lowered = _lowered.get(key)
        if lowered is not None:
            return lowered, [reads[n].tensors[index][1] for n, index in lowered.capture_sources]
    lowered, tensors = _trace(kind, structure, dtype, functions, reads, opaque_read)
    if lowered.retrace_reason is None:
        _lowered.put(key, lowered)
    return lowered, tensors


def _first_opaque_read(reads: list[FunctionReads]) -> str | None:
    return next((r.opaque_read for r in reads if r.opaque_read is not None), None)


@lru_cache(maxsize=1024)
def _lower_library(kind: str, structure: str, dtype: str, default: torch.dtype) -> Lowered:
    return _trace(kind, structure, dtype, (), [], None)[0]


def _trace(
    kind: str,
    structure: str,
    dtype: str,
    functions: tuple,
    reads: list[FunctionReads],
    opaque_read: str | None,
) -> tuple[Lowered, list[Tensor]]:
    """Trace a structure; return it with the tensors that its functions capture."""
    library_tensors: list[Tensor] = []
    mod = _rebuild(structure, None, functions, library_tensors)  # appends to `library_tensors`

    def with_numbers(tracer: Tracer) -> Callable:
        return _rebuild(structure, tracer, functions, library_tensors)

    numbers, recorder = with_numbers if isinstance(mod, Mod) else None, CallRecorder()
    traced = trace(kind, mod, DTYPES[dtype], numbers, recorder if functions else None)
    if recorder.queried_torch:
        traced = trace(kind, mod, DTYPES[dtype], numbers, CallRecorder(), as_called=True)
    # The library's tensors come first, used or not; then the functions' that the graph reads.
    used = [(n, t) for n, t in enumerate(traced.captured) if traced.graph.uses(f"t{n}")]
    function_tensors = [t for _, t in used if not any(t is other for other in library_tensors)]
    order = library_tensors + function_tensors
    graph = _rename(traced.graph, {f"t{n}": f"T{_index(order, t)}" for n, t in used}, order)
    graph = mod.simplified(graph) if isinstance(mod, Mod) else graph
    if not functions:
        return Lowered(graph.text), []
    sources = [_find_source(reads, t) for t in function_tensors]
    followed: set[types.CodeType] = set().union(*(r.codes for r in reads))
    modules: set[int] = set().union(*(r.modules for r in reads))
    reason = opaque_read or traced.value_read or recorder.untracked_call(followed, modules)
    if reason is None and None in sources:
        reason = "captures a tensor that no name leads to"
    if reason is None and any(
        collect_reads(fn).key != before.key for fn, before in zip(functions, reads, strict=True)
    ):
        reason = "changes what it reads"
    shape_sources = tuple(filter(None, (_find_source(reads, t) for t in traced.shape_read)))
    lowered = Lowered(
        graph.text, tuple(filter(None, sources)), shape_sources, retrace_reason=reason
    )
    return lowered, function_tensors


def _find_source(reads: list[FunctionReads], tensor: Tensor) -> tuple[int, int] | None:
    """Return which function can read a tensor, and its index among those that it can read."""
    for n, function_reads in enumerate(reads):
        for index, (_, captured) in enumerate(function_reads.tensors):
            if captured is tensor:
                return n, index
    return None


def lower_guarded(kind: str, structure: str, dtype: str, *functions: Callable) -> Lowered | str:
    """Lower while `torch.compile` traces the call; return the graph with the guards to set.

    An error is returned as its message: the code that is being traced raises it.
    """
    try:
        lowered, _ = lower(kind, structure, dtype, *functions)
        guarded_reads = [collect_reads(fn, guarding=True) for fn in functions]
    except HeadwayError as error:
        return str(error)
    reason = lowered.retrace_reason or _first_opaque_read(guarded_reads)
    if reason is not None:
        return (
            f"the {kind} function {reason}\n  so it has to be traced at every call, which "
            "torch.compile cannot do; make it a tensor that the function indexes, or a number, "
            "attribute or item that it reads by name, or compile without fullgraph=True"
        )
    plain_reads = [collect_reads(fn) for fn in functions]

    def guarded_source(n: int, index: int) -> tuple[int, int]:
        """Return the source of the same tensor in the guarded walk, whose order differs."""
        return _find_source(guarded_reads, plain_reads[n].tensors[index][1])  # type: ignore[return-value]

    sources = list(starmap(guarded_source, lowered.capture_sources))
    paths = [(n, guarded_reads[n].tensors[index][0]) for n, index in sources]
    guards = [(n, guard) for n, r in enumerate(guarded_reads) for guard in r.guards]
    if not GUARDS_CLASSES and (name := _class_attribute(guards)) is not None:
        return (
            f"the {kind} function reads {name} of a class, which torch.compile before PyTorch 2.13 "
            "takes for a constant; make it an attribute of the object, or compile without "
            "fullgraph=True"
        )
    for n, index in starmap(guarded_source, lowered.shape_sources):
        path, tensor = guarded_reads[n].tensors[index]
        guards.append((n, (path, "shape", tuple(tensor.shape))))
    return lowered._replace(capture_paths=tuple(paths), guards=tuple(guards))


def _class_attribute(guards: list[tuple[int, Guard]]) -> str | None:
    """Return the name of an attribute that a function reads from a class, if any."""
    for _, (path, _, _) in guards:
        for step, key in path:
            if step in ("class", "type"):
                return key[1]
    return None


constant_under_compile(lower_guarded)  # Python about Python: it runs once, at compile time


def _index(tensors: list[Tensor], tensor: Tensor) -> int:
    return next(n for n, other in enumerate(tensors) if other is tensor)


def _rename(graph: Graph, names: dict[str, str], order: list[Tensor]) -> Graph:
    nodes = tuple(
        dataclasses.replace(
            node,
            args=tuple(names.get(a, a).lower() if isinstance(a, str) else a for a in node.args),
        )
        for node in graph.nodes
    )
    scalars = tuple(i for i in graph.inputs if i.ndim is None)
    tensors = tuple(Input(f"t{n}", DTYPE_NAMES[t.dtype], t.dim()) for n, t in enumerate(order))
    return Graph(graph.kind, (*scalars, *tensors), nodes, graph.outputs)


def _rebuild(structure: str, tracer: Tracer | None, functions: tuple, dummies: list[Tensor]) -> Any:
    """Return a value from its structure, with symbols for numbers and dummies for tensors.

    Without a tracer, numbers are 0, and new empty tensors are appended to `dummies`.
    """
    next_function, next_dummy = iter(functions), iter(list(dummies))
    counts = {"n": 0, "x": 0}
    dtype = "f32"
    if tracer is not None:
        dtype = next((i.dtype for i in tracer.inputs if i.name == "score"), "f32")

    def ingredient(text: str) -> Any:
        if text == "f":
            return next(next_function)
        if text in ("n", "x"):
            if tracer is None:
                return 0
            name = f"{text}{counts[text]}"
            counts[text] += 1
            return tracer.add_input(name, "i64" if text == "n" else dtype)
        if tracer is not None:
            return next(next_dummy)
        letter, name, size = text.split(":")
        shape = [1] * int(size) if letter == "t" else [int(n) for n in size.split("x") if n]
        dummies.append(torch.empty(shape, dtype=DTYPES[name], device="cpu"))
        return dummies[-1]

    return _assemble(structure, ingredient)


def restore(parts: Parts) -> Any:
    """Return the value that `describe` took apart, from the same ingredients or replacements."""
    functions, tensors = iter(parts.functions), iter(parts.tensors)
    ints, floats = iter(parts.ints), iter(parts.floats)
    return _assemble(
        parts.structure,
        lambda text: next({"f": functions, "n": ints, "x": floats}.get(text, tensors)),
    )


def _assemble(text: str, ingredient: Callable[[str], Any]) -> Any:
    if text in ("f", "n", "x") or text.startswith(("t:", "T:")):
        return ingredient(text)
    if text.startswith("c:"):
        words = {"None": None, "True": True, "False": False}
        is_int = text[2:].lstrip("-").isdigit()
        return words[text[2:]] if text[2:] in words else (int if is_int else float)(text[2:])
    name, bracket, rest = text.partition("(")
    if not bracket:
        return {"None": None, "True": True, "False": False}.get(text, text.strip("'"))
    parts = _split(rest[:-1])
    if name == "partial":
        args, keywords = [], {}
        for part in parts:
            keyword, sign, argument = part.partition("=")
            if sign and keyword.isidentifier():
                keywords[keyword] = _assemble(argument, ingredient)
            else:
                args.append(_assemble(part, ingredient))
        return functools.partial(*args, **keywords)
    items = [_assemble(part, ingredient) for part in parts]
    if not name:
        return tuple(items)
    if name not in Mod.kinds:
        raise ModError(f"there is no score or mask named {name!r} in this version of Headway")
    cls = Mod.kinds[name]
    mod = object.__new__(cls)
    for field, item in zip(cls.fields, items, strict=True):
        object.__setattr__(mod, field, item)
    return mod


def _split(text: str) -> list[str]:
    """Split at the commas that are not inside parentheses."""
    items, depth, start = [], 0, 0
    for n, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            items.append(text[start:n])
            start = n + 1
    return [*items, text[start:]] if text else []


def captured_under_compile(
    functions: list[Callable], captured: Captured, lowered: Lowered
) -> Captured:
    """Return the captured with the functions' tensors added. Dynamo traces this plain code."""
    for n, guard in lowered.guards:
        if not guard_holds(functions[n], guard):
            raise ModError(f"what a score or mask reads changed while it was compiled: {guard[0]}")
    tensors = list(captured.tensors)
    for n, path in lowered.capture_paths:
        tensors.append(resolve_path(functions[n], path))
    return Captured(tensors, captured.ints, captured.floats)


def lower_mod(kind: str, mod: Callable, dtype: torch.dtype) -> tuple[Graph, Captured]:
    """Return the graph of a score or mask and what it captures, outside of `torch.compile`."""
    structure, functions, (tensors, ints, floats) = take_apart(mod)
    lowered, function_tensors = lower(kind, structure, DTYPE_NAMES[dtype], *functions)
    return parse(lowered.text), Captured(tensors + function_tensors, ints, floats)


def retraced(kind: str, mod: Callable, dtype: torch.dtype) -> str | None:
    """Return why a score or mask is traced at every call, with the line; None if it is not."""
    structure, functions, _ = take_apart(mod)
    return lower(kind, structure, DTYPE_NAMES[dtype], *functions)[0].retrace_reason


def many_reads(mod: Callable) -> str | None:
    """Return how many values that a score or mask reads are compared at every call, and how long
    this takes; None where they are few."""
    _, functions, _ = take_apart(mod)
    start = time.perf_counter()
    count = sum(len(collect_reads(fn).key) for fn in functions)
    milliseconds = 1e3 * (time.perf_counter() - start)
    return f"reads {count:,} values ({milliseconds:.1f} ms)" if count > _MANY_READS else None
