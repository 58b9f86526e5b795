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
    graph: Graph, captured: Captured, b: list[int], q_idx: list[int], counts: list[int],
    lengths: list[int],
) -> list[list[KeyRange]]:  # fmt: skip
    """Return, for every row, the keys that any of its queries may see, in disjoint ascending
    ranges.

    **Arguments:** the mask with what it captures, global batch index and position of all queries,
    the number of queries of every row, and of its keys. Where the formula reads a captured tensor
    out of range, the range is all keys: evaluated pair by pair, a kept one raises the error.
    """
    try:
        return _key_ranges(graph, captured, b, q_idx, counts, lengths)
    except IndexError:
        return [[KeyRange(0, n, False)] if n else [] for n in lengths]


def _key_ranges(
    graph: Graph, captured: Captured, b: list[int], q_idx: list[int], counts: list[int],
    lengths: list[int],
) -> list[list[KeyRange]]:  # fmt: skip
    row_ranges: list[list[KeyRange]] = [[] for _ in counts]
    for limits, exact in alternatives(graph):
        starts, stops = [0] * len(counts), list(lengths)
        for limit in limits:
            first_query = 0
            rest = _limit_rests(graph, captured, b, q_idx, limit)
            for n, count in enumerate(counts):
                row_rests = rest[first_query : first_query + count]
                first_query += count
                # sign * (factor * kv_idx + rest) <= 0, or < 0: each edge limits kv_idx.
                edges = [-rest_of_query * limit.factor for rest_of_query in row_rests]
                if limit.sign * limit.factor > 0:
                    stops[n] = min(stops[n], max(edges) + (0 if limit.strict else 1))
                else:
                    starts[n] = max(starts[n], min(edges) + (1 if limit.strict else 0))
        for ranges, start, stop, count in zip(row_ranges, starts, stops, counts, strict=True):
            if start < stop:
                ranges.append(KeyRange(start, stop, exact and count == 1))
    return [_join_ranges(ranges) for ranges in row_ranges]


class _Program(NamedTuple):
    """A program for a limit's `left - right` at kv_idx = 0. Each step appends a number to a list
    that begins with `b`, `q_idx` and `inputs`; `left` and `right` are places in that list."""

    inputs: tuple[int | str, ...]  # constants, and names of captured numbers
    steps: tuple["_Step", ...]
    left: int
    right: int
    uses_b: bool


class _Step(NamedTuple):
    """A step that appends a number."""

    compute: Callable[..., int] | str  # or the name of a table
    places: tuple[int, ...]  # of the operands
    lowest: int  # number of the dtype
    span: int  # how many numbers the dtype has


@lru_cache(maxsize=1024)
def _program(graph: Graph, limit: Limit) -> _Program:
    """Compile the program of a limit."""
    ends = limit.left, limit.right
    limit_graph = subgraph(graph, tuple([x for x in ends if isinstance(x, str)]))
    outputs = iter(limit_graph.outputs)
    left, right = (next(outputs) if isinstance(x, str) else x for x in ends)
    operands = [node.args[1:] if node.op == "gather" else node.args for node in limit_graph.nodes]
    is_computed = lambda x: isinstance(x, str) and (x[0] == "%" or x in ("b", "q_idx"))
    leaf_names = [x for args in (*operands, (left, right)) for x in args if not is_computed(x)]
    leaves = tuple(dict.fromkeys(leaf_names))
    places: dict[Any, int] = {x: n for n, x in enumerate(("b", "q_idx", *leaves))}
    for n in range(len(operands)):
        places[f"%{n}"] = 2 + len(leaves) + n
    steps = tuple([
        _Step(
            node.args[0] if node.op == "gather" else _OPS[node.op],  # type: ignore[arg-type]
            tuple([places[x] for x in args]), *_DTYPE_SPANS[node.dtype],
        )
        for node, args in zip(limit_graph.nodes, operands, strict=True)
    ])  # fmt: skip
    leaf_values = tuple([0 if x == "kv_idx" else x for x in leaves])
    return _Program(leaf_values, steps, places[left], places[right], limit_graph.uses("b"))  # type: ignore[arg-type]


def _limit_rests(
    graph: Graph, captured: Captured, b: list[int], q_idx: list[int], limit: Limit
) -> list[int]:
    """Return `left - right` of every query, at kv_idx = 0."""
    # These are few numbers, for which Python is faster than tensors.
    program = _program(graph, limit)
    inputs = [captured.ints[int(x[1:])] if isinstance(x, str) else x for x in program.inputs]
    tables: dict[Any, Any] = {}
    for step in program.steps:
        if isinstance(step.compute, str):
            table = captured.tensors[int(step.compute[1:])]
            tables[step.compute] = table.tolist() if table.numel() <= 4 * len(b) else table
    rest_by_position: dict[tuple[int, int], int] = {}
    rests = []
    for batch_index, position in zip(b, q_idx, strict=True):
        key = batch_index if program.uses_b else 0, position
        if key not in rest_by_position:
            rest_by_position[key] = _run_program(program, tables, [batch_index, position, *inputs])
        rests.append(rest_by_position[key])
    return rests


def _run_program(program: _Program, tables: dict[Any, Any], values: list[int]) -> int:
    """Run the steps on `values`, which begin with the inputs, and return `left - right`."""
    for compute, places, lowest, span in program.steps:
        operands = [values[place] for place in places]
        if isinstance(compute, str):
            value = tables[compute]
            for place in operands:
                value = value[place]  # IndexError where it is out of range
            value = int(value)
        else:
            value = compute(*operands)
        # Python's integers do not wrap around, those of tensors do.
        values.append(
            value if lowest <= value < lowest + span else (value - lowest) % span + lowest
        )
    return values[program.left] - values[program.right]


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
