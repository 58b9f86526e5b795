"""Interval arithmetic on a mask's graph: bounds of its value over a whole box of pairs at once.

For a box of query positions [i0, i1] and key positions [j0, j1] every value of the graph has bounds
`lo <= value <= hi`; of a boolean, `lo` says that it is True for every pair and `hi` that it is True
for some. Each op has a rule (`rules.py`) that turns bounds of its operands into bounds of its
result. A box is then known to be all False (`not hi`), all True (`lo`) or neither, without
evaluating its pairs. A block mask of a million tokens takes 2 to 3 ms instead of 1.4 to 4.0 s
(docs/performance.md).

Values that depend on the query's position only, or the key's only, need no rules: they cost one
number per position and are evaluated (`split` finds them, `blocks.axis_bounds` evaluates them).
Rules are for the ops that mix the two, such as `kv_idx <= q_idx` itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..graph import DTYPES, FLOATS, Arg, Builder, Graph, Input, Node, Number
from .rules import HUGE, Bounds, node_bounds, operand_dtype, rule_of

POSITION = "position"  # of a query or a key, in a subgraph that reads only one of them

# -- dependence on positions -----------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A graph cut where the query's position meets the key's.

    The first four name the values that the mixed part reads:

    - `numbers`: values that are the same everywhere.
    - `head_values`: values that depend on b, h and captured tensors at most.
    - `rows`: values that depend on q_idx too.
    - `cols`: values that depend on kv_idx too.
    - `mixed`: the nodes that depend on both positions. They include `q_idx + n` and
      `q_idx + n < m`, whose bounds by rules are as good as numbers.
    """

    numbers: tuple[str, ...]
    head_values: tuple[str, ...]
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    mixed: tuple[int, ...]


@lru_cache(maxsize=1024)
def split(graph: Graph) -> Split:
    """Return which values of a mask's graph depend on which position."""
    # The inputs that each value depends on, without run-time numbers.
    reads = {i.name: frozenset(() if i.name[0] in "nx" else (i.name,)) for i in graph.inputs}
    for n, node in enumerate(graph.nodes):
        reads[f"%{n}"] = frozenset().union(*(reads[a] for a in node.args if isinstance(a, str)))
    axes = {name: inputs & {"q_idx", "kv_idx"} for name, inputs in reads.items()}
    mixed: set[int] = set()
    # Names, in order of their first use.
    numbers: dict[str, None] = {}
    head_values, rows, cols = dict(numbers), dict(numbers), dict(numbers)
    todo = [a for a in graph.outputs if isinstance(a, str)]
    while todo:
        name = todo.pop()
        if len(axes[name]) < 2 and not _is_exact(graph, name, axes):
            kind = rows if "q_idx" in axes[name] else cols if axes[name] else head_values
            (kind if reads[name] else numbers)[name] = None
        elif int(name[1:]) not in mixed:
            node = graph.nodes[int(name[1:])]
            mixed.add(int(name[1:]))
            operands = node.args[1:] if node.op == "gather" else node.args
            todo += [a for a in operands if isinstance(a, str)]
    # Sorted by text, so that values computed alike for queries and keys come in the same order.
    rows, cols = (
        sorted(names, key=lambda name: subgraph(graph, (name,), axis).text)
        for names, axis in ((rows, "q_idx"), (cols, "kv_idx"))
    )
    return Split(tuple(numbers), tuple(head_values), tuple(rows), tuple(cols), tuple(sorted(mixed)))


def _is_exact(graph: Graph, name: str, axes: dict[str, frozenset[str]]) -> bool:
    """Return whether a value is a position shifted by, or compared with, a fixed number.

    Bounds by its rule are as good as numbers, and cost nothing per position.
    """
    if name[0] != "%" or not axes[name]:
        return False
    node = graph.nodes[int(name[1:])]
    is_shift = node.op in ("add", "sub") and node.dtype == "i64"
    if not is_shift and node.op not in ("lt", "le", "gt", "ge"):
        return False
    positional = [a for a in node.args if isinstance(a, str) and axes[a]]
    if len(positional) != 1:
        return False
    return positional[0][0] != "%" or _is_exact(graph, positional[0], axes)


@lru_cache(maxsize=1024)
def subgraph(graph: Graph, names: tuple[str, ...], position: str = "") -> Graph:
    """Return the graph of some of a graph's values, which read at most one position.

    That position is renamed to `POSITION`, and source lines are dropped. So values computed alike
    for queries and keys, as in `ids[q_idx] == ids[kv_idx]`, have equal graphs.
    """
    builder = Builder()
    builder.nodes = list(graph.nodes)
    pruned = builder.finish(graph.kind, graph.inputs, names)
    renamed = {position: POSITION}

    def rename(args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        return tuple(renamed.get(a, a) if isinstance(a, str) else a for a in args)

    inputs = [i for i in graph.inputs if pruned.uses(i.name)]
    return Graph(
        graph.kind,
        tuple(Input(renamed.get(i.name, i.name), i.dtype, i.ndim) for i in inputs),
        tuple(Node(node.op, rename(node.args), node.dtype) for node in pruned.nodes),
        rename(pruned.outputs),
    )


def why_elements(graph: Graph) -> list[str]:
    """Return the ops without a rule, each with its source line; empty if all have one.

    Tiles that depend on them are evaluated pair by pair: correct, but slower.
    """
    reasons = {}
    for n in split(graph).mixed:
        node = graph.nodes[n]
        if node.op != "gather" and rule_of(graph, node) is None:
            line = f" in `{node.line}`" if node.line else ""
            reasons[f"{node.op} of {operand_dtype(graph, node)}{line}"] = None
    return list(reasons)


# -- evaluation -----------------------------------------------------------------------------------

GatherBounds = Callable[[int, list[Bounds]], Bounds]

# Ops whose magnitude is at most the sum of the operands' magnitudes plus 1, or their product.
_BOUNDED_OPS = frozenset("add sub mul neg abs sign invert max min where to".split())


@lru_cache(maxsize=1024)
def nodes_in_range(graph: Graph, magnitudes: tuple[tuple[str, int], ...]) -> frozenset[int]:
    """Return the nodes whose integers, and their bounds, cannot leave their dtype's range.

    `magnitudes` bounds the magnitude of inputs, where known. One check of the graph then saves a
    check of every box.
    """
    in_range = set[int]()
    sizes: dict[str, float] = dict(magnitudes)
    for n, node in enumerate(graph.nodes):
        if node.dtype in FLOATS:
            continue
        if node.dtype == "bool":
            sizes[f"%{n}"] = 1
            continue
        args = node.args[1:] if node.op == "where" else node.args
        operands = [sizes.get(a, math.inf) if isinstance(a, str) else abs(a) for a in args]
        info = torch.iinfo(DTYPES[node.dtype])
        size = math.prod(operands) if node.op == "mul" else sum(operands) + 1
        if node.op in _BOUNDED_OPS and size <= min(HUGE, info.max):
            sizes[f"%{n}"] = size
            in_range.add(n)
        elif node.dtype != "i64":
            sizes[f"%{n}"] = info.max + 1
    return frozenset(in_range)


def evaluate(
    graph: Graph,
    values: dict[str, Bounds],
    gather: GatherBounds,
    in_range: frozenset[int] = frozenset(),
) -> Bounds:
    """Return the bounds of the graph's one output over many boxes at once.

    **Arguments:**

    - `values`: bounds of the values that `split` names, tensors that broadcast with each other.
    - `gather`: `(node number, bounds of the indices) -> bounds of the number read`.
    - `in_range`: nodes that are known to stay in their dtype's range (`nodes_in_range`).
    """
    env = dict(values)

    def operand(arg: str | Number) -> Bounds:
        return env[arg] if isinstance(arg, str) else Bounds(arg, arg)

    for n in split(graph).mixed:
        node = graph.nodes[n]
        if node.op == "gather":
            env[f"%{n}"] = gather(n, [operand(a) for a in node.args[1:]])
        else:
            args = [operand(a) for a in node.args]
            env[f"%{n}"] = node_bounds(graph, node, args, n in in_range)
    return operand(graph.outputs[0])
