"""The derivative of a score, by autograd on the score's own graph."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...surroundings import isolated
from ..graph import DTYPES, FLOATS, Arg, Builder, Graph, Input, parse
from ..ops import apply
from ..tracing.tracer import Tracer
from .evaluate import evaluate

_HALVES = {torch.bfloat16, torch.float16}


class _BackwardTracer(Tracer):
    """A tracer that answers autograd's search for NaN in anomaly mode: symbols hold no NaN."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "_is_any_true":
            return torch.zeros((), dtype=torch.bool, device="cpu")
        return super().__torch_dispatch__(func, types, args, kwargs)


class _RoundToHalf(torch.autograd.Function):
    """Rounding to half precision, whose derivative is not rounded.

    PyTorch rounds a derivative to half precision too: for a captured 0-d tensor once, after the sum
    over all pairs. Here the sum comes last, so every pair's part would be rounded, and a sum that
    cancels would lose its digits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.to(dtype).to(torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].to(ctx.dtype), None


def _in_float32(op: str, args: tuple, dtype: torch.dtype, out: None) -> Tensor:
    """Run one op; in half precision as PyTorch does, in float32 and then rounded."""
    if dtype not in _HALVES:
        return apply(op, args, dtype, out)
    value = args[0] if op == "to" else apply(op, args, torch.float32)
    return _RoundToHalf.apply(value, dtype)


@lru_cache(maxsize=1024)
def joint(text: str, gathers: tuple[int, ...] = ()) -> Graph:
    """Return the score and its derivatives in one graph, by autograd on the score's own graph.

    With the graph cut at its gathers, a score is a pure function of S and the gathered values, so
    its outputs are T, dT/dS, and dT/dg for every gather g (by node index) in `gathers`; then the
    same of the number that it observes, if any. A derivative that is zero everywhere is the
    number 0. Gathers keep their order, so the n-th
    gather of the joint graph is the n-th of the score's. Numbers of half precision are rounded
    as the score rounds them; their derivatives are not (`_RoundToHalf`).
    """
    graph = parse(text)
    dtype = next(i.dtype for i in graph.inputs if i.name == "score")
    tracer = _BackwardTracer("derivative of the score function")
    leaves: dict[int, Tensor] = {}
    with isolated(), torch.enable_grad():
        values: dict[str, Any] = {}
        for item in graph.inputs:
            if item.ndim is None:
                values[item.name] = tracer.add_input(item.name, item.dtype)
            else:
                values[item.name] = item.name

        score = values["score"].requires_grad_()

        def gather(n: int, table: Any, indices: tuple) -> Tensor:
            args = (table, *map(tracer.arg, indices))
            value = tracer.symbol(
                tracer.builder.emit("gather", args, graph.nodes[n].dtype, graph.nodes[n].line),
                graph.nodes[n].dtype,
            )
            if value.dtype in _HALVES:
                value = value.float()
            leaves[n] = value.requires_grad_(value.is_floating_point())
            return value

        with tracer:
            results = evaluate(graph, values, gather, compute=_in_float32)
            variables = [score] + [leaves[n] for n in gathers]
            derivatives = [_gradients(x, variables) for x in results]
        outputs: list[Any] = []
        for x, grads in zip(results, derivatives, strict=True):
            outputs.append(tracer.cast(x, DTYPES[dtype]))
            outputs += [0 if g is None else tracer.cast(g, DTYPES[dtype]) for g in grads]
    tensors = tuple(i for i in graph.inputs if i.ndim is not None)
    return tracer.builder.finish("joint", (*tracer.inputs, *tensors), tuple(outputs))


def _gradients(x: Any, variables: list[Tensor]) -> Sequence[Tensor | None]:
    if not isinstance(x, Tensor) or not x.requires_grad:
        return [None] * len(variables)
    # With `grad_outputs`, PyTorch would import sympy: seconds in a fresh process.
    return torch.autograd.grad(x, variables, allow_unused=True, retain_graph=True)


def differentiable_gathers(graph: Graph, tensors: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes of the float gathers from the captured tensors numbered in `tensors`."""
    names = {f"t{n}" for n in tensors}
    return tuple(n for n, node in graph.gathers if node.args[0] in names and node.dtype in FLOATS)


def by_output(score: Graph, outputs: Sequence[Any]) -> list[tuple[Any, Sequence[Any]]]:
    """Return T and its derivatives, from the outputs of a graph made of the score; then the number
    that the score observes and its derivatives, if it does."""
    size = len(outputs) // len(score.outputs)
    return [(outputs[n], outputs[n + 1 : n + size]) for n in range(0, len(outputs), size)]


SCORE_TANGENT = "score_tangent"  # the input of `with_tangent` that holds S'


@lru_cache(maxsize=1024)
def with_tangent(text: str, moving: tuple[int, ...] = ()) -> Graph:
    """Return the score and its tangent T' = dT/dS S' + Σ dT/dg g' in one graph; then the same of
    the number that it observes, if any.

    g' is read where the score reads g, from the tangents of the captured tensors numbered in
    `moving`. These are the graph's last tensors, each of its captured tensor's dtype.
    """
    score = parse(text)
    gathers = differentiable_gathers(score, moving)
    graph = joint(text, gathers)
    dtype = next(i.dtype for i in graph.inputs if i.name == "score")
    builder = Builder()
    builder.nodes = list(graph.nodes)
    joint_nodes = dict(zip([n for n, _ in score.gathers], graph.gathers, strict=True))
    directions: list[Arg] = [SCORE_TANGENT]
    for n in gathers:
        _, node = joint_nodes[n]
        table = f"t{len(score.tensors) + moving.index(int(str(node.args[0])[1:]))}"
        value = builder.emit("gather", (table, *node.args[1:]), node.dtype, node.line)
        if node.dtype != dtype:
            value = builder.emit("to", (value,), dtype)
        directions.append(value)
    outputs: list[Arg] = []
    for result, derivatives in by_output(score, graph.outputs):
        total: Arg = 0
        for derivative, value in zip(derivatives, directions, strict=True):
            if derivative != 0:
                term = builder.emit("mul", (derivative, value), dtype)
                total = term if total == 0 else builder.emit("add", (total, term), dtype)
        outputs += [result, total]
    dims = {i.name: i for i in score.tensors}
    tangents = [
        Input(f"t{len(score.tensors) + n}", dims[f"t{m}"].dtype, dims[f"t{m}"].ndim)
        for n, m in enumerate(moving)
    ]
    inputs = *graph.inputs, Input(SCORE_TANGENT, dtype), *tangents
    return builder.finish("joint", inputs, tuple(outputs))
