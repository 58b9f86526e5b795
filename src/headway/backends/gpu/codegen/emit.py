"""Code generation: a score, its derivative and a mask become `@triton.jit` functions.

Kernels are ordinary files that call `SCORE`, `DERIVATIVE`, `SCATTER` and `MASK`. Only these short
functions are generated: one statement per node of the graph, below the user's source line as a
comment. The generated source names no layouts, so Triton and Gluon both compile it. Captured values
arrive as two tuples: for every tensor its pointer and, per dimension, size and stride; and the
numbers, integers before floats.

Indices are int64 in a graph. They are computed in int32 where the result is provably the same
(int_ranges.py), since a GPU has no 64-bit integer units.

What it buys: any score and mask run inside the kernels. Reading a relative bias once per diagonal
takes the Triton forward from 2,398 to 1,191 instructions; one division for all pairs and the
approximate tanh take softcap from 6,230 to 3,246 (docs/lab/triton.md).
"""

import hashlib
import linecache
import types
from functools import lru_cache

from ....mods.evaluation.derivative import SCORE_TANGENT, by_output, joint, with_tangent
from ....mods.graph import POSITIONS, Builder, Graph, Node, parse
from ....types import PACKAGE
from .affine import affine_score
from .dependence import dependence_of, diagonal_gathers
from .function import OF_NUMBER, OF_T, FunctionEmitter
from .hoist import hoist_mask, hoist_score
from .int_ranges import IntRanges
from .limits import KeyLimitsEmitter
from .spec import CodegenSpec


@lru_cache(maxsize=1024)
def source(codegen_spec: CodegenSpec) -> str:
    """Return the module's source: `score`, `derivative`, `scatter` and `mask`, if the call has
    them; `score_tangent` in place of the first three, if it has tangents. A score that observes a
    number has a function of that for each of T, and none of a T that is S."""
    functions = []
    score_tensors = 0
    if codegen_spec.score is not None and codegen_spec.moving is not None:
        graph = with_tangent(codegen_spec.score, codegen_spec.moving)
        score_tensors = len(graph.tensors)
        emitters = _Emitters(codegen_spec, codegen_spec.wide_offsets[:score_tensors])
        functions += _emit_biases(graph, emitters)
        functions += _emit_score(2, codegen_spec.score, graph, emitters, SCORE_TANGENT)
    elif codegen_spec.score is not None:
        graph = parse(codegen_spec.score)
        score_tensors = len(graph.tensors)
        emitters = _Emitters(codegen_spec, codegen_spec.wide_offsets[:score_tensors])
        derivative = joint(codegen_spec.score, codegen_spec.wanted)
        functions += _emit_biases(graph, emitters)
        functions += _emit_score(0, codegen_spec.score, graph, emitters)
        functions += _emit_score(1, codegen_spec.score, derivative, emitters)
        functions += _emit_affine(graph, emitters)
        if codegen_spec.wanted:
            functions += _emit_scatter(graph, emitters)
    if codegen_spec.mask is not None:
        emitters = _Emitters(codegen_spec, codegen_spec.wide_offsets[score_tensors:])
        graph = parse(codegen_spec.mask)
        functions.append(emitters("mask", graph).emit_outputs())
        functions += _emit_hoisted_mask(graph, emitters)
        if codegen_spec.limits:
            limits = KeyLimitsEmitter(graph, codegen_spec, emitters.wide_offsets).emit_limits()
            functions += [] if limits is None else [limits]
    imports = "import triton\nimport triton.language as tl\n\n"
    code = "".join(f"\n\n{function}" for function in functions)
    modules = "diagonals, gradients, maths" + (", special" if "special." in code else "")
    imports += f"from {PACKAGE}.backends.gpu.device import {modules}\n"
    return imports + code


@lru_cache(maxsize=1024)
def load_module(codegen_spec: CodegenSpec) -> types.ModuleType:
    """Return the module whose functions kernels call.

    Its source is registered with `linecache`, where Triton, tracebacks and debuggers look for it.
    The module's name is a hash of the source. No file is written, and the name does not depend on
    the process.
    """
    code = source(codegen_spec)
    name = f"headway_{hashlib.sha256(code.encode()).hexdigest()[:16]}"
    file = f"<{name}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    exec(compile(code, file, "exec"), module.__dict__)
    return module


class _Emitters:
    """Makes the function emitters of one mod, which share the flags and captured tensors."""

    def __init__(self, codegen_spec: CodegenSpec, wide_offsets: tuple[bool, ...]) -> None:
        self.codegen_spec, self.wide_offsets = codegen_spec, wide_offsets

    def __call__(self, name: str, graph: Graph) -> FunctionEmitter:
        """Return the emitter of a function that evaluates a graph."""
        return FunctionEmitter(name, graph, self.codegen_spec, self.wide_offsets)


def _emit_score(
    kind: int, score: str, graph: Graph, emitters: _Emitters, *tangents: str
) -> list[str]:
    """Emit the function of T, and that of the number that the score observes, if any, by their kind
    in `OF_T`. `graph` is made of the score's."""
    observing = parse(score)
    return [
        emitters(names[kind], graph).emit_outputs(*tangents, only=(result, *derivatives))
        for names, (result, derivatives) in zip(
            (OF_T, OF_NUMBER), by_output(observing, graph.outputs), strict=False
        )
        if names is OF_NUMBER or not (observing.observes and observing.outputs[0] == "score")
    ]


def _emit_affine(graph: Graph, emitters: _Emitters) -> list[str]:
    """Emit `affine` and the functions that it calls; also `score_shared`, `score_of_q` and
    `score_of_kv`, if it takes their results."""
    codegen_spec = emitters.codegen_spec
    if not codegen_spec.affine:
        return []
    ranges = IntRanges(graph, codegen_spec.narrow)
    score = affine_score(graph, ranges, codegen_spec.distance_sign)
    if score is None:
        return []
    functions = [
        emitters(f"distance{n}", graph).emit_integer_sum(distance.integers)
        for n, distance in enumerate(score.distances)
    ]
    position_terms = *score.shared, *score.of_q, *score.of_kv
    operands = [term.value for term in position_terms]
    for term in (*score.gain, *score.distances, *position_terms):
        operands += [number for number, _ in term.factors]
    hoisted = hoist_score(graph, operands) if codegen_spec.hoist else None
    if hoisted is not None:
        for name in ("shared", "of_q", "of_kv"):
            functions.append(emitters(f"score_{name}", graph).emit_hoisted(hoisted, name))
    functions.append(emitters("affine", graph).emit_affine(score, hoisted))
    properties = "has_abs", "abs_only", "slope_only", "constant_gain"
    return [*functions, *(f"{name} = {getattr(score, name)!r}\n" for name in properties)]


def _emit_hoisted_mask(graph: Graph, emitters: _Emitters) -> list[str]:
    """Emit `shared`, `of_q`, `of_kv`, `steps` and `pairs`."""
    codegen_spec = emitters.codegen_spec
    if not codegen_spec.hoist:
        return []
    ranges = IntRanges(graph, codegen_spec.narrow) if codegen_spec.affine else None
    hoisted = hoist_mask(graph, ranges)
    if hoisted is None:
        return []
    functions = [emitters(name, graph).emit_hoisted(hoisted, name) for name in hoisted._fields]
    return [*functions, emitters("pairs", graph).emit_pairs(hoisted)]


def _emit_biases(graph: Graph, emitters: _Emitters) -> list[str]:
    """Emit `bias0`, ...: each returns a gather that depends on kv_idx - q_idx alone."""
    if not emitters.codegen_spec.per_diagonal:
        return []
    return [
        emitters(f"bias{k}", _subgraph(graph, n)).emit_last_node()
        for k, n in enumerate(diagonal_gathers(graph))
    ]


def _emit_scatter(graph: Graph, emitters: _Emitters) -> list[str]:
    """Emit `scatter` and the functions of offsets that it calls.

    `scatter` adds a tile of partial derivatives to the gradient of every wanted tensor. A kernel
    with bias tables adds those along diagonals itself.
    """
    codegen_spec = emitters.codegen_spec
    functions, statements = [], []
    coordinates = ", ".join(POSITIONS)
    for k, n in enumerate(codegen_spec.wanted):
        gather = graph.nodes[n]
        statements.append(f"# {gather.line}")
        functions.append(emitters(f"offset{k}", _subgraph(graph, n)).emit_offset())
        dependence = gradient_dependence(graph, gather, codegen_spec)
        if dependence == "tables":
            statements.append("pass")
            continue
        width = f", {codegen_spec.exact_width}" if codegen_spec.exact_width else ""
        statements.append(
            f"gradients.add_{dependence}"
            f"(grads[{k}], values[{k}], offset{k}, {coordinates}, captured, score{width})"
        )
    head = ["@triton.jit", f"def scatter(grads, values, score, {coordinates}, captured):"]
    functions.append("\n".join(head + [f"    {line}" for line in statements]) + "\n")
    return functions


def gradient_dependence(graph: Graph, gather: Node, codegen_spec: CodegenSpec) -> str:
    """Return how the gradient of a gather is added up: as `dependence_of` says, by tables, or
    pair by pair where diagonals are nothing in particular."""
    dependence = dependence_of(graph, gather.args[1:])
    if dependence == "diagonals" and codegen_spec.bias_tables:
        return "tables"
    return "pairs" if dependence == "diagonals" and not codegen_spec.consecutive else dependence


def _subgraph(graph: Graph, n: int) -> Graph:
    """Return the part of a graph that gather n needs; the gather is its last node."""
    builder = Builder()
    builder.nodes = list(graph.nodes[: n + 1])
    return builder.finish(graph.kind, graph.inputs, (f"%{n}",))
