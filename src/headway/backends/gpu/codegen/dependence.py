"""Dependence analysis: which positions a value or the index of a gather depends on.

A gradient of a captured tensor is a sum over all pairs that read the same number. A tile of pairs
is reduced before the atomic add: to one number where the index depends on neither position, to a
row or column where it depends on one, and along diagonals where it depends on the difference alone.
"""

from collections.abc import Sequence
from math import isfinite

from ....mods.graph import FLOATS, Arg, Graph

KINDS = ("one", "rows", "cols", "diagonals", "pairs")

# Of finite numbers these make finite ones; but `_STEEP` soon overflow.
_FINITE = frozenset(
    "add sub mul neg abs sign max min where to floor ceil round trunc tanh sigmoid erf sin cos "
    "exp exp2 expm1 detach".split()
)
_STEEP = frozenset(("exp", "exp2", "expm1"))


def dependence_of(graph: Graph, indices: Sequence[Arg]) -> str:
    """The kind of a gather at these indices, one of `KINDS`."""
    known = kinds(graph)
    return _join([known[a] if isinstance(a, str) else "one" for a in indices])


def kinds(graph: Graph) -> dict[str, str]:
    """The kind of every input and value of a graph.

    "one": it depends on neither position; "rows": on q_idx; "cols": on kv_idx; "diagonals": on
    `kv_idx - q_idx` only; "pairs": on both otherwise, or on the score.

    A position counts wherever it is read: `q_idx * 0` has the kind "rows", since kernels compute it
    for every row, in a tile of that shape.
    """
    return _walk(graph)[0]


def finite_past_the_end(graph: Graph) -> bool:
    """Whether a score is finite for a query past the end, whose S is 0 and whose position is beyond
    all others, wherever it is finite for those that exist.

    What is read by position is not: nobody need have written what no query reads. Nor are
    quotients, roots and logarithms of what depends on the query, powers of positions, and what is
    written as infinite.
    """
    varies: set[Arg] = {"q_idx", "score"}
    placed: set[Arg] = {"q_idx"}
    for n, (op, args) in enumerate((node.op, node.args) for node in graph.nodes):
        if varies.isdisjoint(args):
            continue
        varies.add(f"%{n}")
        if not placed.isdisjoint(args):
            placed.add(f"%{n}")
        if graph.nodes[n].dtype not in FLOATS:
            continue
        steep = op in _STEEP and not placed.isdisjoint(args)
        known = op in _FINITE or (op == "div" and args[1] not in varies and args[1] != 0)
        if steep or not known or any(isinstance(a, float) and not isfinite(a) for a in args):
            return False
    return True


def slopes(graph: Graph) -> dict[str, tuple[int, int]]:
    """The coefficients of (q_idx, kv_idx) of the integers that are affine in the positions."""
    return _walk(graph)[1]


def _walk(graph: Graph) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    kinds = {"b": "one", "h": "one", "q_idx": "rows", "kv_idx": "cols", "score": "pairs"}
    affine = {"b": (0, 0), "h": (0, 0), "q_idx": (1, 0), "kv_idx": (0, 1)}
    for item in graph.inputs:
        if item.name[0] in "nx" and item.ndim is None:
            kinds[item.name], affine[item.name] = "one", (0, 0)

    def kind(arg: Arg) -> str:
        return kinds[arg] if isinstance(arg, str) else "one"

    def slope(arg: Arg) -> tuple[int, int] | None:
        return affine.get(arg) if isinstance(arg, str) else (0, 0)

    for n, node in enumerate(graph.nodes):
        name = f"%{n}"
        args = node.args[1:] if node.op == "gather" else node.args
        kinds[name] = _join([kind(a) for a in args])
        of = None if node.op == "gather" or node.dtype not in ("i64", "i32") else _slope(
            node.op, args, [slope(a) for a in args]
        )  # fmt: skip
        if of is not None:
            affine[name] = of
            if kinds[name] == "pairs" and of[0] == -of[1]:
                kinds[name] = "diagonals"
        elif kinds[name] == "one":
            affine[name] = (0, 0)
    return kinds, affine


def _slope(op: str, args: Sequence[Arg], slopes: list) -> tuple[int, int] | None:
    if None in slopes:
        return None
    (a, b), (c, d) = slopes[0], slopes[-1]
    if op == "to":
        return a, b
    if op == "neg":
        return -a, -b
    if op == "add":
        return a + c, b + d
    if op == "sub":
        return a - c, b - d
    if op == "mul":
        for number, (e, f) in ((args[1], (a, b)), (args[0], (c, d))):
            if isinstance(number, int):
                return e * number, f * number
    return None


def _join(kinds: list[str]) -> str:
    varying = {k for k in kinds if k != "one"}
    return "one" if not varying else varying.pop() if len(varying) == 1 else "pairs"
