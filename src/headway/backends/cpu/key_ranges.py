"""Derive the keys that few queries may see from the formula of a mask, with no tiles and no pairs.

A mask is read as alternatives, each a conjunction. Where a comparison in one is linear in kv_idx
with a factor of 1 or -1, it gives a first or a last key for every query: `kv_idx <= q_idx`,
`q_idx - kv_idx < window`, `kv_idx < lengths[b]`. Where an alternative
holds anything else, the mask is evaluated pair by pair between them.

Rows of unequal lengths are so 1.3 to 3.1 times as fast as F.sdpa over all keys
(docs/lab/cpu.md, 2026-11-26).
"""

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from ...mods.bounds.interval import subgraph
from ...mods.graph import Graph
from ...types import Captured

_MAX_ALTERNATIVES = 4


class Limit(NamedTuple):
    """A comparison, `sign · (left - right) <= 0`, or `< 0` if `strict`; `left - right` is
    `factor · kv_idx + rest`, with a factor of 1 or -1."""

    left: str | int | float
    right: str | int | float
    sign: int
    factor: int
    strict: bool


class Alternative(NamedTuple):
    """A conjunction of limits; `exact`: of nothing besides them."""

    limits: tuple[Limit, ...]
    exact: bool


@lru_cache(maxsize=1024)
def alternatives(graph: Graph) -> tuple[Alternative, ...]:
    """Return the alternatives of a mask's graph; one without limits if no key is limited."""
    return _read_alternatives(graph, graph.outputs[0], False)


_DTYPE_SPANS = {  # the lowest number, and how many there are
    **{f"i{bits}": (-(1 << (bits - 1)), 1 << bits) for bits in (8, 16, 32, 64)}, "u8": (0, 256)
}  # fmt: skip
_INTEGERS = tuple(_DTYPE_SPANS)
_OPS: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "to": lambda a: a, "min": min, "max": max, "floordiv": operator.floordiv, "mod": operator.mod,
}  # fmt: skip
_UNLIMITED = (Alternative((), False),)
_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _read_alternatives(graph: Graph, name: object, negated: bool) -> tuple[Alternative, ...]:
    """Return the alternatives of one of the graph's values, or of its negation."""
    if not (isinstance(name, str) and name[0] == "%"):
        return _UNLIMITED
    node = graph.nodes[int(name[1:])]
    if node.op == "not":
        return _read_alternatives(graph, node.args[0], not negated)
    if node.op in ("and", "or") and node.dtype == "bool":
        first, second = (_read_alternatives(graph, a, negated) for a in node.args)
        if (node.op == "or") != negated:
            combined = first + second
        else:
            combined = tuple([
                Alternative(a.limits + b.limits, a.exact and b.exact) for a in first for b in second
            ])  # fmt: skip
        return combined if len(combined) <= _MAX_ALTERNATIVES else _UNLIMITED
    if node.op not in _NEGATED:
        return _UNLIMITED
    op = _NEGATED[node.op] if negated else node.op
    left, right = node.args
    factors = _kv_factor(graph, left), _kv_factor(graph, right)
    if None in factors or abs(factors[0] - factors[1]) != 1:  # type: ignore[operator]
        return _UNLIMITED
    if graph.kind == "mask" and any(_reads_head(graph, a) for a in node.args):
        return _UNLIMITED
    sign = 1 if op in ("lt", "le") else -1
    factor = factors[0] - factors[1]  # type: ignore[operator]
    return (Alternative((Limit(left, right, sign, factor, op in ("lt", "gt")),), True),)


def _kv_factor(graph: Graph, name: object) -> int | None:
    """Return by how much an integer grows with kv_idx; None if not evenly."""
    if not isinstance(name, str):
        return 0 if isinstance(name, int) else None
    if name[0] != "%":
        is_integer = any(i.name == name and i.dtype in _INTEGERS for i in graph.inputs)
        return (1 if name == "kv_idx" else 0) if is_integer else None
    node = graph.nodes[int(name[1:])]
    operands = node.args[1:] if node.op == "gather" else node.args
    if node.dtype not in _INTEGERS or (node.op not in _OPS and node.op != "gather"):
        return None
    factors = [_kv_factor(graph, a) for a in operands]
    if all(factor == 0 for factor in factors):
        return 0
    if None in factors or node.dtype != "i64":
        return None
    match node.op:
        case "add":
            return factors[0] + factors[1]  # type: ignore[operator]
        case "sub":
            return factors[0] - factors[1]  # type: ignore[operator]
        case "neg":
            return -factors[0]  # type: ignore[operator]
        case "to":
            return factors[0]
    return None


def _reads_head(graph: Graph, name: object) -> bool:
    """Return whether a value depends on the head."""
    return isinstance(name, str) and subgraph(graph, (name,)).uses("h")


class KeyRange(NamedTuple):
    """Keys `start:stop` that a query may see; `exact`: it sees each of them."""

    start: int
    stop: int
    exact: bool


def key_ranges(
    graph: Graph, captured: Captured, queries: list[list[tuple[int, int]]], lengths: list[int]
) -> list[list[KeyRange]]:
    """Return, for every row, the keys that any of its queries may see, in disjoint ascending
    ranges.

    **Arguments:** the mask with what it captures, (global batch index, position) of the queries of
    every row, and the number of its keys. Where the formula reads a captured tensor out of range,
    the range is all keys: evaluated pair by pair, a kept one raises the error.
    """
    try:
        return _key_ranges(graph, captured, queries, lengths)
    except IndexError:
        return [[KeyRange(0, n, False)] if n else [] for n in lengths]


def _key_ranges(
    graph: Graph, captured: Captured, queries: list[list[tuple[int, int]]], lengths: list[int]
) -> list[list[KeyRange]]:
    row_ranges: list[list[KeyRange]] = [[] for _ in lengths]
    tables: dict[str, Any] = {}  # lists of numbers, where that is faster
    for limits, exact in alternatives(graph):
        starts, stops = [0] * len(lengths), list(lengths)
        for limit in limits:
            rest, names = _rest(graph, limit)
            for name in names - tables.keys():
                table = captured.tensors[int(name[1:])]
                tables[name] = table.tolist() if table.numel() <= 4 * len(lengths) else table
            cached: dict[tuple[int, int], int] = {}  # rows often stand at the same place
            for n, row_queries in enumerate(queries):
                for query in row_queries:
                    if query not in cached:
                        cached[query] = rest(*query, captured.ints, tables)
                # sign * (factor * kv_idx + rest) <= 0, or < 0: each edge limits kv_idx.
                edges = [-cached[query] * limit.factor for query in row_queries]
                if limit.sign * limit.factor > 0:
                    stops[n] = min(stops[n], max(edges) + (0 if limit.strict else 1))
                else:
                    starts[n] = max(starts[n], min(edges) + (1 if limit.strict else 0))
        for ranges, start, stop, count in zip(
            row_ranges, starts, stops, map(len, queries), strict=True
        ):
            if start < stop:
                ranges.append(KeyRange(start, stop, exact and count == 1))
    return [_join_ranges(ranges) for ranges in row_ranges]


# Of few numbers Python computes faster than tensors do. A function of b, q_idx, the captured ints
# and the tables by name.
_Function = Callable[[int, int, list[int], dict[str, Any]], int]


@lru_cache(maxsize=1024)
def _rest(graph: Graph, limit: Limit) -> tuple[_Function, frozenset[str]]:
    """Return the function of a limit's `left - right` at kv_idx = 0, and the tables it reads."""
    left, right = _function(graph, limit.left), _function(graph, limit.right)
    ends = tuple([x for x in (limit.left, limit.right) if isinstance(x, str)])
    nodes = subgraph(graph, ends).nodes
    tables = frozenset(str(node.args[0]) for node in nodes if node.op == "gather")
    return lambda *inputs: left(*inputs) - right(*inputs), tables  # type: ignore[arg-type]


def _function(graph: Graph, name: str | int | float) -> _Function:
    """Return the function of one of the graph's values, at kv_idx = 0."""
    if not isinstance(name, str) or name == "kv_idx":
        number: Any = 0 if isinstance(name, str) else name
        return lambda b, q_idx, ints, tables: number
    if name[0] != "%":
        if name in ("b", "q_idx"):
            return (lambda b, *_: b) if name == "b" else (lambda b, q_idx, *_: q_idx)
        place = int(name[1:])
        return lambda b, q_idx, ints, tables: ints[place]
    node = graph.nodes[int(name[1:])]
    operands = [_function(graph, x) for x in (node.args[node.op == "gather" :])]  # type: ignore[arg-type]
    lowest, span = _DTYPE_SPANS[node.dtype]

    def read(*inputs: Any) -> int:
        value = inputs[3][node.args[0]]
        for operand in operands:
            value = value[operand(*inputs)]  # IndexError where it is out of range
        return int(value)

    def compute(*inputs: Any) -> int:
        value = _OPS[node.op](*[operand(*inputs) for operand in operands])
        # Python's integers do not wrap around, those of tensors do.
        return value if lowest <= value < lowest + span else (value - lowest) % span + lowest

    return read if node.op == "gather" else compute


def _join_ranges(ranges: list[KeyRange]) -> list[KeyRange]:
    """Sort ranges, and join those that meet."""
    joined: list[KeyRange] = []
    for key_range in sorted(ranges):
        if joined and key_range.start <= joined[-1].stop:
            previous = joined[-1]
            joined[-1] = KeyRange(
                previous.start,
                max(previous.stop, key_range.stop),
                previous.exact and key_range.exact,
            )
        else:
            joined.append(key_range)
    return joined
