"""Lower values and functions to graphs, and cache the graphs.

`describe` takes a value (or a bare function) apart into its structure, a string, and its
ingredients; `lower` traces the structure to a `Graph`, and finds the tensors that its functions
capture. A cached graph is reused only if all that its trace read is known to be unchanged
(`tracing.capture`, `tracing.call_recorder`); a function with an opaque read is traced at every
call. A trace takes 0.16 to 0.24 ms (`make_fx`: 12 to 25 ms).
"""

import dataclasses
import time
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..caches import LRUCache
from ..errors import ModError
from ..types import Captured
from .base import Mod
from .graph import DTYPE_NAMES, DTYPES, Graph, Input, parse
from .tracing.call_recorder import CallRecorder
from .tracing.capture import collect_reads
from .tracing.guards import Guard, Path
from .tracing.reads import FunctionReads, aliasing_pattern
from .tracing.recording import Replay
from .tracing.trace import trace
from .tracing.tracer import Tracer

_MANY_READS = 300  # values: comparing them takes longer than the rest of a call on the host


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
    functions.append(item)
    return "f"


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
    opaque_read = first_opaque_read(reads)
    if opaque_read is None:
        lowered = _lowered.get(key)
        if lowered is not None:
            return lowered, [reads[n].tensors[index][1] for n, index in lowered.capture_sources]
    lowered, tensors = trace_structure(kind, structure, dtype, functions, reads, opaque_read)
    if lowered.retrace_reason is None:
        _lowered.put(key, lowered)
    return lowered, tensors


def first_opaque_read(reads: list[FunctionReads]) -> str | None:
    """Return the first read that cannot be followed, or None."""
    return next((r.opaque_read for r in reads if r.opaque_read is not None), None)


@lru_cache(maxsize=1024)
def _lower_library(kind: str, structure: str, dtype: str, default: torch.dtype) -> Lowered:
    return trace_structure(kind, structure, dtype, (), [], None)[0]


def trace_structure(
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
        rebuilt = _rebuild(structure, tracer, functions, library_tensors)
        for fn in functions:
            if isinstance(fn, Replay):
                fn.start(tracer)
        return rebuilt

    numbers = with_numbers if isinstance(mod, Mod | Replay) else None
    recorder = CallRecorder()
    traced = trace(kind, mod, DTYPES[dtype], numbers, recorder if functions else None)
    if recorder.queried_torch or any(r.queries_torch for r in reads):
        traced = trace(kind, mod, DTYPES[dtype], numbers, CallRecorder(), as_called=True)
    # The library's tensors come first, used or not; then the functions' that the graph reads.
    used = [(n, t) for n, t in enumerate(traced.captured) if traced.graph.uses(f"t{n}")]
    function_tensors = [t for _, t in used if not any(t is other for other in library_tensors)]
    order = library_tensors + function_tensors
    graph = _rename(traced.graph, {f"t{n}": f"T{_index(order, t)}" for n, t in used}, order)
    graph = mod.simplified(graph) if isinstance(mod, Mod) else graph
    if not functions:
        return Lowered(graph.text), []
    sources = [find_source(reads, t) for t in function_tensors]
    followed: set[types.CodeType] = set().union(*(r.codes for r in reads))
    modules: set[int] = set().union(*(r.modules for r in reads))
    reason = opaque_read or traced.value_read
    recorded = isinstance(functions[0], Replay)  # Dynamo guards what they read
    reason = reason or (None if recorded else recorder.untracked_call(followed, modules))
    if reason is None and None in sources:
        reason = "captures a tensor that no name leads to"
    if (
        reason is None
        and not recorded
        and any(
            collect_reads(fn).key != before.key for fn, before in zip(functions, reads, strict=True)
        )
    ):
        reason = "changes what it reads"
    shape_sources = tuple(filter(None, (find_source(reads, t) for t in traced.shape_read)))
    lowered = Lowered(
        graph.text, tuple(filter(None, sources)), shape_sources, retrace_reason=reason
    )
    return lowered, function_tensors


def find_source(reads: list[FunctionReads], tensor: Tensor) -> tuple[int, int] | None:
    """Return which function can read a tensor, and its index among those that it can read."""
    for n, function_reads in enumerate(reads):
        for index, (_, captured) in enumerate(function_reads.tensors):
            if captured is tensor:
                return n, index
    return None


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
        _, name, size = text.split(":")
        dummies.append(torch.empty([1] * int(size), dtype=DTYPES[name], device="cpu"))
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
    if text in ("f", "n", "x") or text.startswith("t:"):
        return ingredient(text)
    name, bracket, rest = text.partition("(")
    if not bracket:
        return {"None": None, "True": True, "False": False}.get(text, text.strip("'"))
    parts = _split(rest[:-1])
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
