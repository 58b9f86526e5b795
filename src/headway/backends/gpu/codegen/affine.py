"""Scores that are affine in S: T = gain S + a term of the positions, split by dependence.

Examples: ALiBi, a bias per key or per query, `1.1 * score + 0.01 * (kv_idx - q_idx)`. A tile of
pairs is left with one multiplication of S and one addition per pair:

    T = gain S + f(q_idx) + g(kv_idx)

f and g are computed per row and per column. A multiple of a distance is evaluated at a nearby pair,
where all numbers are small. For an integer L that is affine in both positions

    L(q, kv) = L(q, first) + L(0, kv - first) - L(0, 0)

is exact, so nothing cancels in floats: the error stays within one rounding of the multiple of the
distance and one of that of a tile's length. An absolute value |L| is computed per pair.

What it buys: on Hopper, causal ALiBi reaches 0.94 of the speed of a plain causal call; it reached
0.85 when |i - j| was computed per pair (docs/lab/forward.md).
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ....mods.graph import Arg, Graph, Node
from .dependence import dependences, has_reciprocal, slopes
from .int_ranges import IntRanges


class Term(NamedTuple):
    """A product: `sign` times `factors` times `value`.

    - `factors`: (number that all pairs share, whether it is divided by).
    """

    sign: int
    factors: tuple[tuple[Arg, bool], ...]
    value: Arg


class Distance(NamedTuple):
    """A product: `sign` times `factors` times an integer that is affine in the positions.

    - `integers`: the integer as a sum: (sign, name of a value).
    - `slope`: the integer's coefficients of q_idx and kv_idx.
    - `has_abs`: the integer's absolute value is taken.
    """

    sign: int
    factors: tuple[tuple[Arg, bool], ...]
    integers: tuple[tuple[int, str], ...]
    slope: tuple[int, int]
    has_abs: bool


@dataclass(frozen=True)
class AffineScore:
    """A score as a sum of terms.

    - `gain`: the terms whose value is S.
    - `distances`: multiples of distances; at most one has an absolute value.
    - `shared`, `of_q`, `of_kv`: the terms that all pairs share, that depend on the query, and that
      depend on the key.
    """

    gain: tuple[Term, ...]
    distances: tuple[Distance, ...]
    shared: tuple[Term, ...]
    of_q: tuple[Term, ...]
    of_kv: tuple[Term, ...]

    @property
    def has_abs(self) -> bool:
        """Check that a distance has an absolute value."""
        return any(distance.has_abs for distance in self.distances)

    @property
    def abs_only(self) -> bool:
        """Check that an absolute value is the only term besides S."""
        other_terms = self.shared, self.of_q, self.of_kv
        return self.has_abs and len(self.distances) == 1 and not any(other_terms)

    @property
    def slope_only(self) -> bool:
        """Check that only multiples of distances, besides S, depend on the key."""
        return bool(self.distances) and not self.has_abs and not self.of_kv

    @property
    def constant_gain(self) -> float | None:
        """Return the gain, if it is a finite constant."""
        total = 0.0
        for sign, factors, _ in self.gain:
            for number, divides in factors:
                if isinstance(number, str):
                    return None
                sign *= 1 / number if divides else number
            total += sign
        return total if math.isfinite(total) else None


def affine_score(graph: Graph, ranges: IntRanges, sign: int = 0) -> AffineScore | None:
    """Return the terms of a score; None if it is not affine in S.

    - `sign`: the sign of q_idx - kv_idx in all kept pairs, from `distance_sign`.
    """
    score = _AffineBuilder(graph, ranges).build()
    if score is None or not sign:
        return score
    distances = tuple(_without_abs(distance, graph, sign) for distance in score.distances)
    return replace(score, distances=distances)


def _without_abs(distance: Distance, graph: Graph, distance_sign: int) -> Distance:
    """Return a distance for pairs of one sign, where its absolute value is affine."""
    _, name = distance.integers[0]
    node = graph.nodes[int(name[1:])] if name[0] == "%" else None
    if not distance.has_abs or node is None or node.op != "sub":
        return distance
    if set(node.args) != {"q_idx", "kv_idx"}:
        return distance
    sign = distance.sign * distance_sign * (1 if node.args[0] == "q_idx" else -1)
    q, kv = distance.slope
    return Distance(1, distance.factors, ((sign, name),), (sign * q, sign * kv), False)


def distance_sign(mask: Graph, ints: Sequence[int]) -> int:
    """Return 1 if a mask keeps only pairs with `kv_idx <= q_idx`, -1 if only pairs with
    `kv_idx >= q_idx`, else 0.

    - `ints`: the captured integers.
    """
    slope_of = slopes(mask)
    names = [i.name for i in mask.inputs if i.name[0] == "n"]
    values = {"q_idx": 0, "kv_idx": 0} | dict(zip(names, ints, strict=True))

    def value_at_origin(arg: Arg) -> int | None:
        """Return the value of an affine integer where both positions are 0."""
        if not isinstance(arg, str) or arg[0] != "%":
            return values.get(arg) if isinstance(arg, str) else int(arg)
        node = mask.nodes[int(arg[1:])]
        operands = [value_at_origin(a) for a in node.args] if node.op in _AFFINE_OPS else [None]
        integers = [operand for operand in operands if operand is not None]
        return _AFFINE_OPS[node.op](*integers) if len(integers) == len(operands) else None

    def slope(arg: Arg) -> tuple[int, int] | None:
        return slope_of.get(arg) if isinstance(arg, str) else (0, 0)

    def kept_sign(condition: Arg) -> int:
        """Return the sign of the pairs that a condition keeps; 0 if unknown."""
        is_node = isinstance(condition, str) and condition[0] == "%"
        node = mask.nodes[int(condition[1:])] if is_node else None  # type: ignore[index]
        if node is not None and node.op == "and" and node.dtype == "bool":
            return next(filter(None, map(kept_sign, node.args)), 0)
        if node is None or node.op not in ("le", "lt", "ge", "gt"):
            return 0
        a, b = node.args if node.op in ("le", "lt") else node.args[::-1]
        slope_a, slope_b = slope(a), slope(b)
        origin_a, origin_b = value_at_origin(a), value_at_origin(b)
        if slope_a is None or slope_b is None or origin_a is None or origin_b is None:
            return 0
        # a - b = q (q_idx - kv_idx) + c with c >= 0, and the mask keeps a - b <= 0.
        q, kv = slope_a[0] - slope_b[0], slope_a[1] - slope_b[1]
        return (q < 0) - (q > 0) if q == -kv and origin_a >= origin_b else 0

    return kept_sign(mask.outputs[0])


_AFFINE_OPS: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "to": operator.pos,
}  # fmt: skip


class _NotAffine(Exception):
    """The score is not affine in S, or a term varies by pair."""


class _AffineBuilder:
    """Splits a score into the terms of an `AffineScore`."""

    def __init__(self, graph: Graph, ranges: IntRanges) -> None:
        self.graph, self.ranges = graph, ranges
        self.dependences, self.slopes = dependences(graph), slopes(graph)
        self.has_score = {"score"}  # values that depend on S
        for n, node in enumerate(graph.nodes):
            if any(a in self.has_score for a in node.args):
                self.has_score.add(f"%{n}")
        self.distances: list[Distance] = []
        self.terms: dict[str, list[Term]] = {  # by dependence
            "gain": [], "one": [], "rows": [], "cols": [],
        }  # fmt: skip

    def build(self) -> AffineScore | None:
        """Return the terms of the score; None if it is not affine in S."""
        try:
            for term in self._terms(Term(1, (), self.graph.outputs[0]), with_score=True):
                if term.value == "score":
                    self.terms["gain"].append(term)
                elif term.value in self.has_score:
                    raise _NotAffine
                else:
                    self._add(term)
        except _NotAffine:
            return None
        gain, shared, of_q, of_kv = map(tuple, self.terms.values())
        if not gain or sum(distance.has_abs for distance in self.distances) > 1:
            return None
        return AffineScore(gain, tuple(self.distances), shared, of_q, of_kv)

    def _terms(self, term: Term, with_score: bool) -> list[Term]:
        """Return the terms that sum to this one. `with_score`: split only terms that have S."""
        sign, factors, value = term
        node = self._node(value)
        if node is None or node.dtype != "f32" or (with_score and value not in self.has_score):
            return [term]
        addends: Sequence[Term] = ()
        if node.op in ("add", "sub"):
            a, b = node.args
            addends = Term(sign, factors, a), Term(sign if node.op == "add" else -sign, factors, b)
        elif node.op == "neg":
            addends = (Term(-sign, factors, node.args[0]),)
        elif node.op == "mul":
            for number, multiplicand in (node.args, node.args[::-1]):
                if self._dependence(number) == "one":
                    addends = (Term(sign, (*factors, (number, False)), multiplicand),)
        elif node.op == "div" and has_reciprocal(node.args[1], self.dependences):
            addends = (Term(sign, (*factors, (node.args[1], True)), node.args[0]),)
        elif node.op == "to" and self._dtype(node.args[0]) == "f32":
            addends = (Term(sign, factors, node.args[0]),)
        if not addends:
            return [term]
        return [part for addend in addends for part in self._terms(addend, with_score)]

    def _add(self, term: Term) -> None:
        """Add a term without S: as distances, or by its dependence."""
        if self._add_distances(term):
            return
        dependence = self._dependence(term.value)
        if dependence not in self.terms:
            raise _NotAffine
        self.terms[dependence].append(term)

    def _add_distances(self, term: Term) -> bool:
        """Add a term to the distances, if it is a sum of multiples of affine integers and of
        numbers that all pairs share.

        Integers with the same factors are summed as integers, since they may cancel.
        """
        by_factors: dict[tuple, list[tuple[int, str]]] = {}
        shared = []
        for part in self._terms(term, with_score=False):
            integer, has_abs = self._affine_integer(part.value)
            if integer is not None:
                key = (*sorted(part.factors, key=repr), has_abs)
                by_factors.setdefault(key, []).append((part.sign, integer))
            elif self._dependence(part.value) == "one":
                shared.append(part)
            else:
                return False
        distances = []
        for (*factors, has_abs), integers in by_factors.items():
            if has_abs and len(integers) > 1:
                return False
            sign = integers[0][0] if has_abs else 1
            integers = [(1, integers[0][1])] if has_abs else integers
            signed_slopes = [(s, *self.slopes[name]) for s, name in integers]
            slope = (
                sum(s * q for s, q, _ in signed_slopes),
                sum(s * kv for s, _, kv in signed_slopes),
            )
            distances.append(Distance(sign, tuple(factors), tuple(integers), slope, has_abs))
        if distances:
            self.distances += distances
            self.terms["one"] += shared
        return bool(distances)

    def _affine_integer(self, value: Arg) -> tuple[str | None, bool]:
        """Return the affine integer that a float is, or None; and whether it is its absolute
        value."""
        has_abs = False
        node = self._node(value)
        while node is not None and (node.op == "abs" or (node.op, node.dtype) == ("to", "f32")):
            has_abs |= node.op == "abs"
            value = node.args[0]
            node = self._node(value)
        varies = value in self.slopes and self._dependence(value) != "one"
        return (value if varies and self._is_int32(value) else None), has_abs  # type: ignore[return-value]

    def _is_int32(self, name: Arg) -> bool:
        assert isinstance(name, str)
        return self._dtype(name) == "i64" and self.ranges.type(name) == "tl.int32"

    def _dependence(self, arg: Arg) -> str:
        return self.dependences[arg] if isinstance(arg, str) else "one"

    def _node(self, arg: Arg) -> Node | None:
        return self.graph.nodes[int(arg[1:])] if isinstance(arg, str) and arg[0] == "%" else None

    def _dtype(self, arg: Arg) -> str:
        node = self._node(arg)
        if node is not None:
            return node.dtype
        return next((i.dtype for i in self.graph.inputs if i.name == arg and i.ndim is None), "")
