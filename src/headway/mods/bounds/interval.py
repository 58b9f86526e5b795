"""Bounds instead of numbers: what a mask's graph can be over a whole box of pairs at once.

For a box of query positions [i0, i1] and key positions [j0, j1] every value of the graph has bounds
`lo <= value <= hi`; of a boolean, `lo` says that it is True for every pair and `hi` that it is True
for some. Each op has a rule (`rules.py`) that turns bounds of its operands into bounds of its
result, so that a box is known to be all False (`not hi`), all True (`lo`) or neither, without a
look at its pairs.

Values that depend on the query's position only, or the key's only, need no rules: they cost one
number per position and are computed as they are (`split` says which they are; `blocks.sides`
does so). Rules are for the ops that mix the two, such as `kv_idx <= q_idx` itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..graph import DTYPES, FLOATS, Builder, Graph, Input, Node, Number
from .rules import HUGE, Bounds, node_bounds, operand_dtype, rule_of

POSITION = "position"  # of a query or of a key, in a part of a graph that has one of them

# -- what depends on what -------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A graph cut where the query's position meets the key's.

    `numbers`, `fixed`, `rows` and `cols` name the values that the mixed part reads: those that are
    the same everywhere, that depend on b, h and captured tensors at most, on q_idx too, and on
    kv_idx too. `mixed` numbers the nodes that depend on both, and with them `q_idx + n` and
    `q_idx + n < m`, which bounds describe as well as numbers do.
    """

    numbers: tuple[str, ...]
    fixed: tuple[str, ...]
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    mixed: tuple[int, ...]


@lru_cache(maxsize=1024)
def split(graph: Graph) -> Split:
    """Which values of a mask's graph depend on which position."""
    # The inputs that each value depends on, less run-time numbers.
    reads = {i.name: frozenset(() if i.name[0] in "nx" else (i.name,)) for i in graph.inputs}
    for n, node in enumerate(graph.nodes):
        reads[f"%{n}"] = frozenset().union(*(reads[a] for a in node.args if isinstance(a, str)))
    axes = {name: found & {"q_idx", "kv_idx"} for name, found in reads.items()}
    mixed: set[int] = set()
    # Names, in order of their first use.
    numbers: dict[str, None] = {}
    fixed, rows, cols = dict(numbers), dict(numbers), dict(numbers)
    todo = [a for a in graph.outputs if isinstance(a, str)]
    while todo:
        name = todo.pop()
        if len(axes[name]) < 2 and not _is_exact(graph, name, axes):
            kind = rows if "q_idx" in axes[name] else cols if axes[name] else fixed
            (kind if reads[name] else numbers)[name] = None
        elif int(name[1:]) not in mixed:
            node = graph.nodes[int(name[1:])]
            mixed.add(int(name[1:]))
            operands = node.args[1:] if node.op == "gather" else node.args
            todo += [a for a in operands if isinstance(a, str)]
    # Whatever is read of queries and of keys alike comes in the same order.
    rows, cols = (
        sorted(names, key=lambda name: part(graph, (name,), axis).text)
        for names, axis in ((rows, "q_idx"), (cols, "kv_idx"))
    )
    return Split(tuple(numbers), tuple(fixed), tuple(rows), tuple(cols), tuple(sorted(mixed)))


def _is_exact(graph: Graph, name: str, axes: dict[str, frozenset[str]]) -> bool:
    """A position plus or minus what is fixed, or compared with it: bounds by its rule are as good
    as numbers, and cost nothing per position."""
    if name[0] != "%" or not axes[name]:
        return False
    node = graph.nodes[int(name[1:])]
    shift = node.op in ("add", "sub") and node.dtype == "i64"
    if not shift and node.op not in ("lt", "le", "gt", "ge"):
        return False
    moving = [a for a in node.args if isinstance(a, str) and axes[a]]
    if len(moving) != 1:
        return False
    return moving[0][0] != "%" or _is_exact(graph, moving[0], axes)


@lru_cache(maxsize=1024)
def part(graph: Graph, names: tuple[str, ...], position: str = "") -> Graph:
    """The graph of some of a graph's values, of which one position at most is read.

    It is called `POSITION` there, and source lines are left out: what queries and keys read in the
    same way, such as `ids[q_idx] == ids[kv_idx]`, are equal graphs.
    """
    builder = Builder()
    builder.nodes = list(graph.nodes)
    whole = builder.finish(graph.kind, graph.inputs, names)
    new = {position: POSITION}
    return Graph(
        graph.kind,
        tuple(Input(new.get(i.name, i.name), i.dtype, i.ndim) for i in graph.inputs
              if whole.uses(i.name)),
        tuple(Node(node.op, tuple(new.get(a, a) if isinstance(a, str) else a for a in node.args),
                   node.dtype) for node in whole.nodes),
        tuple(new.get(a, a) if isinstance(a, str) else a for a in whole.outputs),
    )  # fmt: skip


def why_elements(graph: Graph) -> list[str]:
    """The ops that have no rule here, each with its source line; empty if all have one.

    Tiles whose verdict hangs on them are evaluated pair by pair: right, and slower.
    """
    found = {}
    for n in split(graph).mixed:
        node = graph.nodes[n]
        if node.op != "gather" and rule_of(graph, node) is None:
            line = f" in `{node.line}`" if node.line else ""
            found[f"{node.op} of {operand_dtype(graph, node)}{line}"] = None
    return list(found)


# -- evaluation -----------------------------------------------------------------------------------

GatherBounds = Callable[[int, list[Bounds]], Bounds]

# Of these, bounds are no larger than the sum of the operands' bounds, or their product, and 1.
_MODEST = frozenset("add sub mul neg abs sign invert max min where to".split())


@lru_cache(maxsize=1024)
def fitting(graph: Graph, known: tuple[tuple[str, int], ...]) -> frozenset[int]:
    """The nodes whose integers cannot leave their dtype's range, and nor can their bounds.

    `known`: inputs, and how far from 0 they are at most, where that is known. One look at the graph
    then saves one at every box.
    """
    found = set[int]()
    sizes: dict[str, float] = dict(known)
    for n, node in enumerate(graph.nodes):
        if node.dtype in FLOATS:
            continue
        if node.dtype == "bool":
            sizes[f"%{n}"] = 1
            continue
        args = node.args[1:] if node.op == "where" else node.args
        of = [sizes.get(a, math.inf) if isinstance(a, str) else abs(a) for a in args]
        info = torch.iinfo(DTYPES[node.dtype])
        size = math.prod(of) if node.op == "mul" else sum(of) + 1
        if node.op in _MODEST and size <= min(HUGE, info.max):
            sizes[f"%{n}"] = size
            found.add(n)
        elif node.dtype != "i64":
            sizes[f"%{n}"] = info.max + 1
    return frozenset(found)


def evaluate(
    graph: Graph,
    values: dict[str, Bounds],
    gather: GatherBounds,
    fits: frozenset[int] = frozenset(),
) -> Bounds:
    """Bounds of the graph's one output over many boxes at once.

    **Arguments:**

    - `values`: of everything that `split` names, tensors that broadcast against each other.
    - `gather`: `(node number, bounds of the indices) -> bounds of the number read`.
    - `fits`: nodes that are known to stay in range (`fitting`).
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
            env[f"%{n}"] = node_bounds(graph, node, args, n in fits)
    return operand(graph.outputs[0])
