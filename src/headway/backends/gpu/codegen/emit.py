"""Source text for kernels: a score, its derivative and a mask as `@triton.jit` functions.

Kernels are ordinary files that call `SCORE`, `DERIVATIVE`, `SCATTER`, `MASK`. Only these short
functions are generated, one line per operation of the graph, with the user's source line as a
comment. The text names no layouts: Triton and Gluon both compile it. Captured values arrive as two
tuples: for every tensor its pointer and, per dimension, size and stride; and the numbers, ints
before floats.

Indices are int64 in a graph. They are computed in int32 where that provably changes nothing
(int_ranges.py), since a GPU has no 64-bit integer units.
"""

import hashlib
import linecache
import types
from functools import lru_cache

from ....mods.evaluation.derivative import joint
from ....mods.graph import POSITIONS, Builder, Graph, parse
from ....types import PACKAGE
from .affine import affine_score
from .dependence import dependence_of
from .function import Function, Text, diagonal_gathers
from .hoist import hoist_mask, hoist_score
from .int_ranges import IntRanges
from .limits import Limits


@lru_cache(maxsize=1024)
def source(text: Text) -> str:
    """The module's source: `score`, `derivative`, `scatter` and `mask`, where the call has them."""
    parts = []
    of_score = 0
    if text.score is not None:
        graph = parse(text.score)
        of_score = len(graph.tensors)
        wide_offsets = text.wide_offsets[:of_score]
        derivative = joint(text.score, text.wanted)
        parts += _biases(graph, text, wide_offsets)
        parts.append(Function("score", graph, text, wide_offsets).outputs())
        parts.append(Function("derivative", derivative, text, wide_offsets).outputs())
        parts += _affine(graph, text, wide_offsets)
        if text.wanted:
            parts += _scatter(graph, text, wide_offsets)
    if text.mask is not None:
        wide_offsets = text.wide_offsets[of_score:]
        graph = parse(text.mask)
        parts.append(Function("mask", graph, text, wide_offsets).outputs())
        parts += _hoisted(graph, text, wide_offsets)
        if text.limits and (limits := Limits(graph, text, wide_offsets).source()) is not None:
            parts.append(limits)
    head = "import triton\nimport triton.language as tl\n\n"
    head += f"from {PACKAGE}.backends.gpu.device import diagonals, gradients, maths\n"
    return head + "".join(f"\n\n{part}" for part in parts)


@lru_cache(maxsize=1024)
def functions(text: Text) -> types.ModuleType:
    """The module, whose functions kernels call.

    Its source is registered with `linecache`, where Triton, tracebacks and debuggers look for it,
    under a name made from its content. No file is written, and nothing depends on the process.
    """
    code = source(text)
    name = f"headway_{hashlib.sha256(code.encode()).hexdigest()[:16]}"
    file = f"<{name}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    exec(compile(code, file, "exec"), module.__dict__)
    return module


def _affine(graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> list[str]:
    """`affine` and the functions it calls; and `score_shared`, `score_of_q`, `score_of_kv`, if it
    takes their results."""
    found = (
        affine_score(graph, IntRanges(graph, text.narrow), text.distance_sign)
        if text.affine
        else None
    )
    if found is None:
        return []
    parts = [
        Function(f"distance{n}", graph, text, wide_offsets).integer_sum(line.of)
        for n, line in enumerate(found.distances)
    ]
    names = [p.value for p in (*found.shared, *found.of_q, *found.of_kv)]
    for part in (*found.gain, *found.distances, *found.shared, *found.of_q, *found.of_kv):
        names += [a for a, _ in part.factors]
    values = hoist_score(graph, names) if text.hoist else None
    if values is not None:
        for name in ("shared", "of_q", "of_kv"):
            parts.append(Function(f"score_{name}", graph, text, wide_offsets).hoisted(values, name))
    parts.append(Function("affine", graph, text, wide_offsets).affine(found, values))
    properties = "has_abs", "abs_only", "slope_only", "constant_gain"
    return [*parts, *(f"{name} = {getattr(found, name)!r}\n" for name in properties)]


def _hoisted(graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> list[str]:
    """`shared`, `of_q`, `of_kv`, `steps` and `pairs`."""
    if not text.hoist:
        return []
    values = hoist_mask(graph, IntRanges(graph, text.narrow) if text.affine else None)
    if values is None:
        return []
    parts = [
        Function(name, graph, text, wide_offsets).hoisted(values, name) for name in values._fields
    ]
    return [*parts, Function("pairs", graph, text, wide_offsets).pairs(values)]


def _biases(graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> list[str]:
    """`bias0`, ...: each a gather that depends on kv_idx - q_idx alone."""
    found = diagonal_gathers(graph) if text.per_diagonal else []
    return [
        Function(f"bias{k}", _subgraph(graph, n), text, wide_offsets).value()
        for k, n in enumerate(found)
    ]


def _scatter(graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> list[str]:
    """`scatter`, which adds a tile of partial derivatives to the gradient of every wanted tensor
    (without those along diagonals, if the kernel has bias tables); and the functions of offsets."""
    parts, lines = [], []
    for k, n in enumerate(text.wanted):
        node = graph.nodes[n]
        lines.append(f"# {node.line}")
        at = Function(f"offset{k}", _subgraph(graph, n), text, wide_offsets)
        parts.append(at.offset())
        how, where = dependence_of(graph, node.args[1:]), ", ".join(POSITIONS)
        if how == "diagonals" and text.bias_tables:  # the kernel adds these itself
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


def _subgraph(graph: Graph, n: int) -> Graph:
    """The part of a graph that gather n needs; the gather is its last node."""
    builder = Builder()
    builder.nodes = list(graph.nodes[: n + 1])
    return builder.finish(graph.kind, graph.inputs, (f"%{n}",))
