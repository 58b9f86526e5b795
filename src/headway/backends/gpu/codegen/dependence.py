"""Dependence analysis: which positions a value or the index of a gather depends on.

A gradient of a captured tensor is a sum over all pairs that read the same number. A tile of pairs
is reduced before the atomic add: to one number where the index depends on neither position, to a
row or column where it depends on one, and along diagonals where it depends on the difference alone.

Reading a relative bias by diagonals takes the forward from 2,398 to 1,191 instructions, and dq with
the table's gradient from 3,081 to 1,473 (docs/lab/triton.md).
"""

from collections.abc import Mapping, Sequence
from math import isfinite

from ....mods.evaluation.derivative import SCORE_TANGENT
from ....mods.graph import FLOATS, Arg, Graph
from ....mods.ops import has_trait


def dependence_of(graph: Graph, indices: Sequence[Arg]) -> str:
    """Return the dependence of a gather at these indices (`dependences`)."""
    dependence = dependences(graph)
    return _join([dependence[a] if isinstance(a, str) else "one" for a in indices])


def dependences(graph: Graph) -> dict[str, str]:
    """Return the dependence of every input and node of a graph.

    - "one": on neither position;
    - "rows": on q_idx;
    - "cols": on kv_idx;
    - "diagonals": on `kv_idx - q_idx` only;
    - "pairs": on both otherwise, or on the score.

    A position counts wherever it is read: `q_idx * 0` depends on "rows", since kernels compute it
    for every row, in a tile of that shape.
    """
    return _analyse(graph)[0]


def slopes(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return the coefficients of (q_idx, kv_idx) of the integers that are affine in the
    positions."""
    return _analyse(graph)[1]


def has_reciprocal(divisor: Arg, dependence: Mapping[str, str]) -> bool:
    """Check that all pairs are divided by one number, whose reciprocal is finite."""
    if isinstance(divisor, str):
        return dependence[divisor] == "one"
    return 1e-30 < abs(divisor) < 1e30


def float_gathers(graph: Graph, dependence: str) -> list[int]:
    """Return the gathers of floats whose indices have this dependence."""
    return [
        n for n, node in graph.gathers
        if node.dtype in FLOATS and dependence_of(graph, node.args[1:]) == dependence
    ]  # fmt: skip


def diagonal_gathers(graph: Graph) -> list[int]:
    """Return the gathers of floats that read one number per diagonal of a tile."""
    return float_gathers(graph, "diagonals")


def gathers_in_kernel(graph: Graph) -> list[int]:
    """Return the gathers left to the kernel where those of `diagonal_gathers` come from tables."""
    from_tables = set(diagonal_gathers(graph))
    reached: set[Arg] = set()
    pending = list(graph.outputs)
    while pending:
        name = pending.pop()
        if not isinstance(name, str) or name[0] != "%" or name in reached:
            continue
        if int(name[1:]) in from_tables:
            continue
        reached.add(name)
        pending += graph.nodes[int(name[1:])].args
    return [n for n, _ in graph.gathers if f"%{n}" in reached]


def finite_past_the_end(graph: Graph) -> bool:
    """Check that a score is finite for a query past the end wherever it is finite for the others.

    Such a query has S = 0 and a position beyond all others. The check fails for gathers by
    position: a number that no query reads may never have been written. It also fails for
    quotients, roots and logarithms that depend on the query, for powers of positions, and for
    infinite constants.
    """
    query_values: set[Arg] = {"q_idx", "score"}
    position_values: set[Arg] = {"q_idx"}
    for n, node in enumerate(graph.nodes):
        op, args = node.op, node.args
        if query_values.isdisjoint(args):
            continue
        query_values.add(f"%{n}")
        if not position_values.isdisjoint(args):
            position_values.add(f"%{n}")
        if node.dtype not in FLOATS:
            continue
        overflows = has_trait(op, "overflows") and not position_values.isdisjoint(args)
        finite_quotient = op == "div" and args[1] not in query_values and args[1] != 0
        infinite_constant = any(isinstance(a, float) and not isfinite(a) for a in args)
        finite = has_trait(op, "finite") or op in ("to", "where") or finite_quotient
        if overflows or infinite_constant or not finite:
            return False
    return True


def _analyse(graph: Graph) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    """Return the dependences and the slopes of a graph's values."""
    dependence = {"b": "one", "h": "one", "q_idx": "rows", "kv_idx": "cols"}
    dependence |= {"score": "pairs", SCORE_TANGENT: "pairs"}
    slope = {"b": (0, 0), "h": (0, 0), "q_idx": (1, 0), "kv_idx": (0, 1)}
    for item in graph.inputs:
        if item.name[0] in "nx" and item.ndim is None:
            dependence[item.name], slope[item.name] = "one", (0, 0)

    for n, node in enumerate(graph.nodes):
        name = f"%{n}"
        args = node.args[1:] if node.op == "gather" else node.args
        dependence[name] = _join([dependence[a] if isinstance(a, str) else "one" for a in args])
        node_slope = None
        if node.op != "gather" and node.dtype in ("i64", "i32"):
            arg_slopes = [slope.get(a) if isinstance(a, str) else (0, 0) for a in args]
            node_slope = _slope(node.op, args, arg_slopes)
        if node_slope is not None:
            slope[name] = node_slope
            if dependence[name] == "pairs" and node_slope[0] == -node_slope[1]:
                dependence[name] = "diagonals"
        elif dependence[name] == "one":
            slope[name] = (0, 0)
    return dependence, slope


def _slope(op: str, args: Sequence[Arg], arg_slopes: list) -> tuple[int, int] | None:
    """Return the slope of an op's result; None if the result is not affine."""
    if None in arg_slopes:
        return None
    (a, b), (c, d) = arg_slopes[0], arg_slopes[-1]
    if op == "to":
        return a, b
    if op == "neg":
        return -a, -b
    if op == "add":
        return a + c, b + d
    if op == "sub":
        return a - c, b - d
    if op == "mul":
        for number, (q, kv) in ((args[1], (a, b)), (args[0], (c, d))):
            if isinstance(number, int):
                return q * number, kv * number
    return None


def _join(dependence: list[str]) -> str:
    """Return the dependence of a value that is computed from values with these."""
    varying = {kind for kind in dependence if kind != "one"}
    return "one" if not varying else varying.pop() if len(varying) == 1 else "pairs"
