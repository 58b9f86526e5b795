"""From values and functions to graphs.

`describe` takes a value (or a bare function) apart into its structure, a string, and its
ingredients; `lower` turns the structure into a `Graph`, and finds what its functions capture. The
graph is used again only where all that its trace read is known to be unchanged (`capture`,
`watch`); a function that reads anything else is traced at every call.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from functools import lru_cache
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..caches import Cache
from ..errors import HeadwayError, ModError
from ..types import Captured, constant_under_compile, fixed
from .base import Mod
from .graph import DTYPE_NAMES, DTYPES, Graph, Input, parse
from .tracing.call_recorder import Watch
from .tracing.capture import Guard, Path, Reads, holds, reads, resolve, shared
from .tracing.trace import trace
from .tracing.tracer import Tracer

# Whether Dynamo guards the attributes of classes, and takes methods for constants.
GUARDS_CLASSES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class Parts(NamedTuple):
    """What a score or mask is made of. `structure` is text, the rest its ingredients in order."""

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
    """Its structure, the functions in it, and the tensors and numbers of its values. Plain code
    that Dynamo can trace; what it reads is guarded at every call, so it reads little."""
    functions: list[Callable] = []
    captured = Captured([], [], [])
    return _structure(mod, functions, captured), functions, captured


def parts_of(mod: Callable) -> Parts:
    """`describe`, outside of `torch.compile`: a value, whose fields never change, is taken apart
    once. (The dtype of a tensor of it may: the structure tells what it was at first.)"""
    if not (isinstance(mod, Mod) and mod.of_library):
        return Parts("f", [mod], [], [], [])
    found = mod.__dict__.get("parts")
    if found is None:
        found = mod.__dict__["parts"] = describe(mod)
    return found


# Written out once: `int | float` makes a new type wherever it is read, and this runs at every call.
_WHOLE, _REAL, _WORD = (int, torch.SymInt), (float, torch.SymFloat), (bool, str)


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
    if item is None or isinstance(item, _WORD):
        return repr(item)
    if isinstance(item, _WHOLE):
        captured.ints.append(item)  # type: ignore[arg-type]
        return "n"
    if isinstance(item, _REAL):
        captured.floats.append(item)  # type: ignore[arg-type]
        return "x"
    if type(item) is functools.partial and _is_plain(item):
        given = [_constant(x, captured) for x in item.args]
        given += [name + "=" + _constant(x, captured) for name, x in item.keywords.items()]
        return "partial(" + ",".join([_structure(item.func, functions, captured), *given]) + ")"
    functions.append(item)
    return "f"


_PLAIN = int, float, bool, type(None), torch.SymInt, torch.SymFloat


def _is_plain(item: functools.partial) -> bool:
    """Whether a partial can be taken apart into a function, tensors and plain numbers, as it has to
    be where it is made in what `torch.compile` traces; elsewhere it is one more function."""
    if not torch.compiler.is_compiling():
        return False
    for x in (*item.args, *item.keywords.values()):
        if not isinstance(x, Tensor) and type(x) not in _PLAIN:
            return False
    return True


def _constant(item: Any, captured: Captured) -> str:
    """An argument of a `functools.partial`: its numbers are the formula's, its tensors captured
    with their shape, which the function may read."""
    if not isinstance(item, Tensor):
        if isinstance(item, _WHOLE) and not isinstance(item, bool):
            item = operator.index(item)  # `dynamic=True` makes symbols of numbers
        elif isinstance(item, _REAL):
            item = fixed(item)
        return "c:" + repr(item)
    captured.tensors.append(item)
    return "T:" + DTYPE_NAMES[item.dtype] + ":" + "x".join([str(size) for size in item.shape])


class Lowered(NamedTuple):
    """A traced score or mask.

    - `text`: its graph's. The library's tensors come first among its inputs, then the functions'.
    - `picks`: where these are: (which function, which of the tensors that it can read).
    - `sized`: those of which the functions read the shape.
    - `paths`, `guards`: for `torch.compile`: the picks by path, and what else each function reads.
    - `again`: why it has to be traced at every call, with the line; None if it need not.
    """

    text: str
    picks: tuple[tuple[int, int], ...] = ()
    sized: tuple[tuple[int, int], ...] = ()
    paths: tuple[tuple[int, Path], ...] = ()
    guards: tuple[tuple[int, Guard], ...] = ()
    again: str | None = None


_lowered: Cache[Lowered] = Cache(1024)


def lower(
    kind: str, structure: str, dtype: str, *functions: Callable
) -> tuple[Lowered, list[Tensor]]:
    """The graph of a structure, and the tensors that its functions capture. Traced once for all
    values of its numbers and tensors, if all that the trace read can be told to be the same."""
    default = torch.get_default_dtype()  # that of `0.1 * q_idx`
    if not functions:
        return _lower_library(kind, structure, dtype, default), []
    found = [reads(fn) for fn in functions]
    unseen = next((of.unseen for of in found if of.unseen is not None), None)
    key = (kind, structure, dtype, default, shared(found), *(tuple(of.key) for of in found))
    if unseen is None:
        lowered = _lowered.get(key)
        if lowered is not None:
            return lowered, [found[n].tensors[at][1] for n, at in lowered.picks]
    lowered, tensors = _lower(kind, structure, dtype, functions, found, unseen)
    if lowered.again is None:
        _lowered.put(key, lowered)
    return lowered, tensors


@lru_cache(maxsize=1024)
def _lower_library(kind: str, structure: str, dtype: str, default: torch.dtype) -> Lowered:
    return _lower(kind, structure, dtype, (), [], None)[0]


def _lower(
    kind: str, structure: str, dtype: str, functions: tuple, found: list[Reads], unseen: str | None
) -> tuple[Lowered, list[Tensor]]:
    library: list[Tensor] = []
    mod = _rebuild(structure, None, functions, library)  # once for the list of stand-ins

    def with_numbers(tracer: Tracer) -> Callable:
        return _rebuild(structure, tracer, functions, library)

    numbers, watch = with_numbers if isinstance(mod, Mod) else None, Watch()
    made = trace(kind, mod, DTYPES[dtype], numbers, watch if functions else None)
    if watch.asked:
        made = trace(kind, mod, DTYPES[dtype], numbers, Watch(), as_called=True)
    # The library's tensors come first, used or not; then the functions' that the graph reads.
    used = [(n, t) for n, t in enumerate(made.captured) if made.graph.uses(f"t{n}")]
    theirs = [t for _, t in used if not any(t is x for x in library)]
    order = library + theirs
    graph = _rename(made.graph, {f"t{n}": f"T{_index(order, t)}" for n, t in used}, order)
    if not functions:
        return Lowered(graph.text), []
    picks = [_pick(found, t) for t in theirs]
    again = unseen or made.value_read or watch.unfollowed(set().union(*(f.codes for f in found)))
    if again is None and None in picks:
        again = "captures a tensor that no name leads to"
    if again is None and any(
        reads(fn).key != f.key for fn, f in zip(functions, found, strict=True)
    ):
        again = "changes what it reads"
    sized = tuple(filter(None, (_pick(found, t) for t in made.sized)))
    return Lowered(graph.text, tuple(filter(None, picks)), sized, again=again), theirs


def _pick(found: list[Reads], tensor: Tensor) -> tuple[int, int] | None:
    """Which function can read a tensor, and as which of its own."""
    for n, of in enumerate(found):
        for at, (_, t) in enumerate(of.tensors):
            if t is tensor:
                return n, at
    return None


def lower_guarded(kind: str, structure: str, dtype: str, *functions: Callable) -> Lowered | str:
    """`lower` while `torch.compile` traces the call, with what it is to guard. The message of an
    error, if there is one: it is raised in the code that is traced."""
    try:
        lowered, _ = lower(kind, structure, dtype, *functions)
        found = [reads(fn, guarding=True) for fn in functions]
    except HeadwayError as error:
        return str(error)
    again = lowered.again or next((of.unseen for of in found if of.unseen is not None), None)
    if again is not None:
        return (
            f"the {kind} function {again}\n  so it has to be traced at every call, which "
            "torch.compile cannot do; make it a tensor that the function indexes, or a number, "
            "attribute or item that it reads by name, or compile without fullgraph=True"
        )
    seen = [reads(fn) for fn in functions]

    def placed(n: int, at: int) -> tuple[int, int]:
        return _pick(found, seen[n].tensors[at][1])  # type: ignore[return-value]

    paths = [(n, found[n].tensors[at][0]) for n, at in starmap(placed, lowered.picks)]
    guards = [(n, guard) for n, of in enumerate(found) for guard in of.guards]
    if not GUARDS_CLASSES and (name := _of_class(guards)) is not None:
        return (
            f"the {kind} function reads {name} of a class, which torch.compile before PyTorch 2.13 "
            "takes for a constant; make it an attribute of the object, or compile without "
            "fullgraph=True"
        )
    for n, at in starmap(placed, lowered.sized):
        path, tensor = found[n].tensors[at]
        guards.append((n, (path, "shape", tuple(tensor.shape))))
    return lowered._replace(paths=tuple(paths), guards=tuple(guards))


def _of_class(guards: list[tuple[int, Guard]]) -> str | None:
    """What a function reads of a class, if anything."""
    for _, (path, _, _) in guards:
        for step, at in path:
            if step in ("class", "type"):
                return at[1]
    return None


constant_under_compile(lower_guarded)  # Python about Python: it runs once, at compile time


def _index(items: list[Tensor], item: Tensor) -> int:
    return next(n for n, x in enumerate(items) if x is item)


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
    """A value from its structure, with symbols for numbers and empty tensors for captured ones.

    Without a tracer, numbers are 0 and the dummies are made and appended to `dummies`.
    """
    fns, made = iter(functions), iter(list(dummies))
    counts = {"n": 0, "x": 0}
    dtype = "f32"
    if tracer is not None:
        dtype = next((i.dtype for i in tracer.inputs if i.name == "score"), "f32")

    def ingredient(text: str) -> Any:
        if text == "f":
            return next(fns)
        if text in ("n", "x"):
            if tracer is None:
                return 0
            name = f"{text}{counts[text]}"
            counts[text] += 1
            return tracer.add_input(name, "i64" if text == "n" else dtype)
        if tracer is not None:
            return next(made)
        letter, name, size = text.split(":")
        shape = [1] * int(size) if letter == "t" else [int(n) for n in size.split("x") if n]
        dummies.append(torch.empty(shape, dtype=DTYPES[name], device="cpu"))
        return dummies[-1]

    return _assemble(structure, ingredient)


def restore(parts: Parts) -> Any:
    """The value that `describe` took apart, from the same ingredients or others in their place."""
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
        whole = text[2:].lstrip("-").isdigit()
        return words[text[2:]] if text[2:] in words else (int if whole else float)(text[2:])
    name, bracket, rest = text.partition("(")
    if not bracket:
        return {"None": None, "True": True, "False": False}.get(text, text.strip("'"))
    parts = _split(rest[:-1])
    if name == "partial":
        args, keywords = [], {}
        for part in parts:
            word, sign, of_word = part.partition("=")
            if sign and word.isidentifier():
                keywords[word] = _assemble(of_word, ingredient)
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
    """Add the functions' tensors; plain code that Dynamo traces, and guards all that it reads."""
    for n, guard in lowered.guards:
        if not holds(functions[n], guard):
            raise ModError(f"what a score or mask reads changed while it was compiled: {guard[0]}")
    tensors = list(captured.tensors)
    for n, path in lowered.paths:
        tensors.append(resolve(functions[n], path))
    return Captured(tensors, captured.ints, captured.floats)


def lower_mod(kind: str, mod: Callable, dtype: torch.dtype) -> tuple[Graph, Captured]:
    """The graph of a score or mask and what it captures, outside of `torch.compile`."""
    structure, functions, (tensors, ints, floats) = take_apart(mod)
    lowered, theirs = lower(kind, structure, DTYPE_NAMES[dtype], *functions)
    return parse(lowered.text), Captured(tensors + theirs, ints, floats)


def retraced(kind: str, mod: Callable, dtype: torch.dtype) -> str | None:
    """Why a score or mask is traced at every call, with the line; None if it is not."""
    structure, functions, _ = take_apart(mod)
    return lower(kind, structure, DTYPE_NAMES[dtype], *functions)[0].again
