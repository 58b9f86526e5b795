"""First and last keys of few queries, from the formula of a mask: no tiles, no look at pairs.

A mask is read as alternatives, each a conjunction. Where a comparison in one is linear in kv_idx
with a factor of 1 or -1, it says a first or a last key for every query: `kv_idx <= q_idx`,
`q_idx - kv_idx < window`, `kv_idx < lengths[b]`. Whatever else is in it is left to be looked at
pair by pair between them.
"""

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from ...mods.bounds.interval import part
from ...mods.graph import Graph
from ...types import Captured

_ALTERNATIVES = 4  # more are not told apart


class Limit(NamedTuple):
    """`sign · (left - right) <= 0`, or `< 0` if `strict`; `left - right` is
    `factor · kv_idx + rest`, with a factor of 1 or -1."""

    left: str | int | float
    right: str | int | float
    sign: int
    factor: int
    strict: bool


class Alternative(NamedTuple):
    """A conjunction; `exact`: it consists of the limits alone."""

    limits: tuple[Limit, ...]
    exact: bool


@lru_cache(maxsize=1024)
def alternatives(graph: Graph) -> tuple[Alternative, ...]:
    """What a mask's graph says about keys; one alternative without limits if nothing."""
    return _read(graph, graph.outputs[0], False)


_SPAN = {  # the lowest number, and how many there are
    **{f"i{bits}": (-(1 << (bits - 1)), 1 << bits) for bits in (8, 16, 32, 64)}, "u8": (0, 256)
}  # fmt: skip
_INTEGERS = tuple(_SPAN)
_OPS: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "to": lambda a: a, "min": min, "max": max, "floordiv": operator.floordiv, "mod": operator.mod,
}  # fmt: skip
_ANY = (Alternative((), False),)
_TURNED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _read(graph: Graph, name: object, negated: bool) -> tuple[Alternative, ...]:
    if not (isinstance(name, str) and name[0] == "%"):
        return _ANY
    node = graph.nodes[int(name[1:])]
    if node.op == "not":
        return _read(graph, node.args[0], not negated)
    if node.op in ("and", "or") and node.dtype == "bool":
        first, second = (_read(graph, a, negated) for a in node.args)
        if (node.op == "or") != negated:
            found = first + second
        else:
            found = tuple([
                Alternative(x.limits + y.limits, x.exact and y.exact) for x in first for y in second
            ])  # fmt: skip
        return found if len(found) <= _ALTERNATIVES else _ANY
    if node.op not in _TURNED:
        return _ANY
    op = _TURNED[node.op] if negated else node.op
    left, right = node.args
    factors = _factor(graph, left), _factor(graph, right)
    if None in factors or abs(factors[0] - factors[1]) != 1:  # type: ignore[operator]
        return _ANY
    if graph.kind == "mask" and any(_reads_head(graph, a) for a in node.args):
        return _ANY
    sign = 1 if op in ("lt", "le") else -1
    factor = factors[0] - factors[1]  # type: ignore[operator]
    return (Alternative((Limit(left, right, sign, factor, op in ("lt", "gt")),), True),)


def _factor(graph: Graph, name: object) -> int | None:
    """By how much an integer grows with kv_idx; None if not evenly."""
    if not isinstance(name, str):
        return 0 if isinstance(name, int) else None
    if name[0] != "%":
        whole = any(i.name == name and i.dtype in _INTEGERS for i in graph.inputs)
        return (1 if name == "kv_idx" else 0) if whole else None
    node = graph.nodes[int(name[1:])]
    operands = node.args[1:] if node.op == "gather" else node.args
    if node.dtype not in _INTEGERS or (node.op not in _OPS and node.op != "gather"):
        return None
    found = [_factor(graph, a) for a in operands]
    if all(f == 0 for f in found):
        return 0
    if None in found or node.dtype != "i64":
        return None
    match node.op:
        case "add":
            return found[0] + found[1]  # type: ignore[operator]
        case "sub":
            return found[0] - found[1]  # type: ignore[operator]
        case "neg":
            return -found[0]  # type: ignore[operator]
        case "to":
            return found[0]
    return None


def _reads_head(graph: Graph, name: object) -> bool:
    return isinstance(name, str) and part(graph, (name,)).uses("h")


class Ranges(NamedTuple):
    """Keys `start:stop` that a query may see; `exact`: all of them, and none besides."""

    start: int
    stop: int
    exact: bool


def key_ranges(
    graph: Graph, captured: Captured, b: list[int], q_idx: list[int], counts: list[int],
    lengths: list[int],
) -> list[list[Ranges]]:  # fmt: skip
    """For every row, the stretches of its keys that any of its queries may see, apart and in order.

    **Arguments:** the mask with what it captures, global batch index and position of all queries,
    the number of queries of every row, and its keys. Where the formula reads a captured tensor out
    of range, all keys are looked at pair by pair: at one that is kept that is an error.
    """
    try:
        return _key_ranges(graph, captured, b, q_idx, counts, lengths)
    except IndexError:
        return [[Ranges(0, n, False)] if n else [] for n in lengths]


def _key_ranges(
    graph: Graph, captured: Captured, b: list[int], q_idx: list[int], counts: list[int],
    lengths: list[int],
) -> list[list[Ranges]]:  # fmt: skip
    of_rows: list[list[Ranges]] = [[] for _ in counts]
    for limits, exact in alternatives(graph):
        starts, stops = [0] * len(counts), list(lengths)
        for limit in limits:
            at = 0
            rest = _rest(graph, captured, b, q_idx, limit)
            for n, count in enumerate(counts):
                own = rest[at : at + count]
                at += count
                # sign * (factor * kv_idx + rest) <= 0, or < 0: kv_idx is on one side of an edge.
                edge = [-r * limit.factor for r in own]
                if limit.sign * limit.factor > 0:
                    stops[n] = min(stops[n], max(edge) + (0 if limit.strict else 1))
                else:
                    starts[n] = max(starts[n], min(edge) + (1 if limit.strict else 0))
        for found, start, stop, count in zip(of_rows, starts, stops, counts, strict=True):
            if start < stop:
                found.append(Ranges(start, stop, exact and count == 1))
    return [_joined(found) for found in of_rows]


class _Program(NamedTuple):
    """How a limit's `left - right` is worked out, at kv_idx = 0: numbers are added to a list that
    begins with `b`, `q_idx` and `given`, and `left` and `right` are places in it."""

    given: tuple[int | str, ...]  # constants, and names of captured numbers
    steps: tuple["_Step", ...]
    left: int
    right: int
    uses_b: bool


class _Step(NamedTuple):
    """One number more."""

    compute: Callable[..., int] | str  # or the name of a table
    places: tuple[int, ...]  # of the operands
    low: int  # of the dtype
    count: int  # numbers that it has


@lru_cache(maxsize=1024)
def _program(graph: Graph, limit: Limit) -> _Program:
    ends = limit.left, limit.right
    needed = part(graph, tuple([x for x in ends if isinstance(x, str)]))
    outputs = iter(needed.outputs)
    left, right = (next(outputs) if isinstance(x, str) else x for x in ends)
    operands = [node.args[1:] if node.op == "gather" else node.args for node in needed.nodes]
    named = lambda x: isinstance(x, str) and (x[0] == "%" or x in ("b", "q_idx"))
    read = [x for args in (*operands, (left, right)) for x in args if not named(x)]
    given = tuple(dict.fromkeys(read))
    places: dict[Any, int] = {x: n for n, x in enumerate(("b", "q_idx", *given))}
    for n in range(len(operands)):
        places[f"%{n}"] = 2 + len(given) + n
    steps = tuple([
        _Step(
            node.args[0] if node.op == "gather" else _OPS[node.op],  # type: ignore[arg-type]
            tuple([places[x] for x in args]), *_SPAN[node.dtype],
        )
        for node, args in zip(needed.nodes, operands, strict=True)
    ])  # fmt: skip
    numbers = tuple([0 if x == "kv_idx" else x for x in given])
    return _Program(numbers, steps, places[left], places[right], needed.uses("b"))  # type: ignore[arg-type]


def _rest(
    graph: Graph, captured: Captured, b: list[int], q_idx: list[int], limit: Limit
) -> list[int]:
    """`left - right` of every query, at kv_idx = 0."""
    # Few numbers: Python is faster than tensors.
    program = _program(graph, limit)
    given = [captured.ints[int(x[1:])] if isinstance(x, str) else x for x in program.given]
    tables: dict[Any, Any] = {}
    for step in program.steps:
        if isinstance(step.compute, str):
            table = captured.tensors[int(step.compute[1:])]
            tables[step.compute] = table.tolist() if table.numel() <= 4 * len(b) else table
    known: dict[tuple[int, int], int] = {}
    found = []
    for at, q in zip(b, q_idx, strict=True):
        key = at if program.uses_b else 0, q
        if key not in known:
            known[key] = _run(program, tables, [at, q, *given])
        found.append(known[key])
    return found


def _run(program: _Program, tables: dict[Any, Any], values: list[int]) -> int:
    for compute, places, low, count in program.steps:
        operands = [values[n] for n in places]
        if isinstance(compute, str):
            value = tables[compute]
            for n in operands:
                value = value[n]  # IndexError where it is out of range
            value = int(value)
        else:
            value = compute(*operands)
        # Python's integers do not wrap around, those of tensors do.
        values.append(value if low <= value < low + count else (value - low) % count + low)
    return values[program.left] - values[program.right]


def _joined(found: list[Ranges]) -> list[Ranges]:
    """In order; stretches that meet are one."""
    out: list[Ranges] = []
    for x in sorted(found):
        if out and x.start <= out[-1].stop:
            last = out[-1]
            out[-1] = Ranges(last.start, max(last.stop, x.stop), last.exact and x.exact)
        else:
            out.append(x)
    return out
