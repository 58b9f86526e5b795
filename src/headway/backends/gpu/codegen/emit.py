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
from .dependence import dependence_of
from .function import Function, Text, diagonal_gathers
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
        wide_offsets = text.wide_offsets[:of_score]
        derivative = joint(text.score, text.wanted)
        parts += _bands(graph, text, wide_offsets)
        parts.append(Function("score", graph, text, wide_offsets).whole())
        parts.append(Function("derivative", derivative, text, wide_offsets).whole())
        parts += _apart(graph, text, wide_offsets)
        if text.wanted:
            parts += _scatter(graph, text, wide_offsets)
    if text.mask is not None:
        wide_offsets = text.wide_offsets[of_score:]
        graph = parse(text.mask)
        parts.append(Function("mask", graph, text, wide_offsets).whole())
        parts += _sides(graph, text, wide_offsets)
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


def _apart(graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> list[str]:
    """`linear` and what it calls; `score_shared`, `score_of_q` and `score_of_kv` where it is given
    what they return."""
    found = linear(graph, Widths(graph, text.narrow), text.distance_sign) if text.affine else None
    if found is None:
        return []
    parts = [
        Function(f"line{n}", graph, text, wide_offsets).whole_numbers(line.of)
        for n, line in enumerate(found.lines)
    ]
    names = [p.value for p in (*found.shared, *found.of_q, *found.of_kv)]
    for part in (*found.gain, *found.lines, *found.shared, *found.of_q, *found.of_kv):
        names += [a for a, _ in part.by]
    known = needed(graph, names) if text.hoist else None
    if known is not None:
        for name in ("shared", "of_q", "of_kv"):
            parts.append(Function(f"score_{name}", graph, text, wide_offsets).before(known, name))
    parts.append(Function("affine", graph, text, wide_offsets).apart(found, known))
    properties = "has_abs", "abs_only", "slope_only", "constant_gain"
    return [*parts, *(f"{name} = {getattr(found, name)!r}\n" for name in properties)]


def _sides(graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> list[str]:
    """`shared`, `of_q`, `of_kv`, `steps` and `pairs`."""
    if not text.hoist:
        return []
    known = sides(graph, Widths(graph, text.narrow) if text.affine else None)
    if known is None:
        return []
    parts = [
        Function(name, graph, text, wide_offsets).before(known, name) for name in known._fields
    ]
    return [*parts, Function("pairs", graph, text, wide_offsets).pairs(known)]


def _bands(graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> list[str]:
    """`band0`, ...: such a gather at given positions."""
    found = diagonal_gathers(graph) if text.per_diagonal else []
    return [
        Function(f"band{k}", _only(graph, n), text, wide_offsets).value()
        for k, n in enumerate(found)
    ]


def _scatter(graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> list[str]:
    """`scatter`, which adds a tile of every wanted partial to the gradient of its tensor (but those
    along diagonals that are `spread`), and the functions that say where."""
    parts, lines = [], []
    for k, n in enumerate(text.wanted):
        node = graph.nodes[n]
        lines.append(f"# {node.line}")
        at = Function(f"offset{k}", _only(graph, n), text, wide_offsets)
        parts.append(at.offset())
        how, where = dependence_of(graph, node.args[1:]), ", ".join(POSITIONS)
        if how == "diagonals" and text.bias_tables:  # the kernel does
            lines.append("pass")
            continue
        if how == "diagonals" and not text.consecutive:
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
