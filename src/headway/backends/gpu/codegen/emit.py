"""Text for kernels: a score, its derivative and a mask as `@triton.jit` functions.

Kernels are ordinary files that call `SCORE`, `DERIVATIVE`, `SCATTER`, `MASK`; only those few-line
functions are generated, one line per op of the graph, with the user's source line as a comment.
The text says nothing about layouts: Triton and Gluon compile it alike. What is captured arrives as
two tuples: of every tensor its pointer and, per dimension, size and stride; and the numbers, ints
then floats.

Indices are int64 in a graph. They are computed in int32 where that provably changes nothing
(int_ranges.py), since a GPU has no 64-bit integer units.
"""

import hashlib
import linecache
import types
from functools import lru_cache

from ....mods.derivative import joint
from ....mods.graph import POSITIONS, Builder, Graph, parse
from .affine import linear
from .dependence import variation
from .function import Function, Text, diagonal
from .hoist import needed, sides
from .int_ranges import Widths


@lru_cache(maxsize=1024)
def source(text: Text) -> str:
    """The module's source: those of `score`, `derivative`, `scatter` and `mask` that there are."""
    parts = []
    of_score = 0
    if text.score is not None:
        graph = parse(text.score)
        of_score = len(graph.tensors)
        far = text.far[:of_score]
        derivative = joint(text.score, text.wanted)
        parts += _bands(graph, text, far)
        parts.append(Function("score", graph, text, far).whole())
        parts.append(Function("derivative", derivative, text, far).whole())
        parts += _apart(graph, text, far)
        if text.wanted:
            parts += _scatter(graph, text, far)
    if text.mask is not None:
        far = text.far[of_score:]
        graph = parse(text.mask)
        parts.append(Function("mask", graph, text, far).whole())
        parts += _sides(graph, text, far)
    head = "import triton\nimport triton.language as tl\n\n"
    head += "from headway.backends.gpu.device import diagonals, gradients, maths\n"
    return head + "".join(f"\n\n{part}" for part in parts)


@lru_cache(maxsize=1024)
def functions(text: Text) -> types.ModuleType:
    """The module, ready for kernels to call.

    Its source is registered with `linecache`, where Triton, tracebacks and debuggers look for it,
    under a name made from its content: no file is written, and nothing depends on the process.
    """
    code = source(text)
    name = f"headway_{hashlib.sha256(code.encode()).hexdigest()[:16]}"
    file = f"<{name}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    exec(compile(code, file, "exec"), module.__dict__)
    return module


def _apart(graph: Graph, text: Text, far: tuple[bool, ...]) -> list[str]:
    """`linear` and what it calls; `score_shared`, `score_of_q` and `score_of_kv` where it is given
    what they return."""
    found = linear(graph, Widths(graph, text.narrow), text.side) if text.apart else None
    if found is None:
        return []
    parts = [
        Function(f"line{n}", graph, text, far).whole_numbers(line.of)
        for n, line in enumerate(found.lines)
    ]
    names = [p.value for p in (*found.shared, *found.of_q, *found.of_kv)]
    for part in (*found.gain, *found.lines, *found.shared, *found.of_q, *found.of_kv):
        names += [a for a, _ in part.by]
    known = needed(graph, names) if text.sides else None
    if known is not None:
        for name in ("shared", "of_q", "of_kv"):
            parts.append(Function(f"score_{name}", graph, text, far).before(known, name))
    parts.append(Function("linear", graph, text, far).apart(found, known))
    properties = "bent", "lone", "straight", "known"
    return [*parts, *(f"{name} = {getattr(found, name)!r}\n" for name in properties)]


def _sides(graph: Graph, text: Text, far: tuple[bool, ...]) -> list[str]:
    """`shared`, `of_q`, `of_kv`, `steps` and `pairs`."""
    if not text.sides:
        return []
    known = sides(graph, Widths(graph, text.narrow) if text.apart else None)
    if known is None:
        return []
    parts = [Function(name, graph, text, far).before(known, name) for name in known._fields]
    return [*parts, Function("pairs", graph, text, far).pairs(known)]


def _bands(graph: Graph, text: Text, far: tuple[bool, ...]) -> list[str]:
    """`band0`, ...: such a gather at given positions."""
    found = diagonal(graph) if text.bands else []
    return [Function(f"band{k}", _only(graph, n), text, far).value() for k, n in enumerate(found)]


def _scatter(graph: Graph, text: Text, far: tuple[bool, ...]) -> list[str]:
    """`scatter`, which adds a tile of every wanted partial to the gradient of its tensor (but those
    along diagonals that are `spread`), and the functions that say where."""
    parts, lines = [], []
    for k, n in enumerate(text.wanted):
        node = graph.nodes[n]
        lines.append(f"# {node.line}")
        at = Function(f"offset{k}", _only(graph, n), text, far)
        parts.append(at.offset())
        how, where = variation(graph, node.args[1:]), ", ".join(POSITIONS)
        if how == "diagonals" and text.spread:  # the kernel does
            lines.append("pass")
            continue
        if how == "diagonals" and not text.straight:
            how = "pairs"
        lines.append(
            f"gradients.add_{how}(grads[{k}], values[{k}], offset{k}, {where}, captured, score)"
        )
    head = [
        "@triton.jit",
        f"def scatter(grads, values, score, {', '.join(POSITIONS)}, captured):",
    ]
    parts.append("\n".join(head + [f"    {line}" for line in lines]) + "\n")
    return parts


def _only(graph: Graph, n: int) -> Graph:
    """The part of a graph that gather n needs; the gather comes last."""
    builder = Builder()
    builder.nodes = list(graph.nodes[: n + 1])
    return builder.finish(graph.kind, graph.inputs, (f"%{n}",))
