"""Scores that are affine in S: T = gain S + a term of the positions, split by dependence.

Examples: ALiBi, a bias per key or per query, `1.1 * score + 0.01 * (kv_idx - q_idx)`. A tile of
pairs is left with one multiplication of S and one addition per pair:

    T = gain S + f(q_idx) + g(kv_idx)

f and g are computed per row and per column. A multiple of a distance is evaluated at a nearby pair,
where all numbers are small. For an integer L that is affine in both positions

    L(q, kv) = L(q, first) + L(0, kv - first) - L(0, 0)

is exact, so nothing cancels in floats: the error stays within one rounding of the multiple of the
distance and one of that of a tile's length. An absolute value |L| is computed per pair.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ....mods.graph import Arg, Graph, Node
from .dependence import kinds, slopes
from .int_ranges import IntRanges


class Term(NamedTuple):
    """`sign` times the product of `factors` times `value`.

    - `factors`: (number that all pairs share, whether it is divided by).
    """

    sign: int
    factors: tuple[tuple[Arg, bool], ...]
    value: Arg


class Distance(NamedTuple):
    """`sign` times the product of `factors` times an integer that is affine in the positions.

    - `of`: the integer as a sum: (sign, name of a value).
    - `slope`: the integer's coefficients of q_idx and kv_idx.
    - `has_abs`: the integer's absolute value is taken.
    """

    sign: int
    factors: tuple[tuple[Arg, bool], ...]
    of: tuple[tuple[int, str], ...]
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
        """Whether there is an absolute value."""
        return any(distance.has_abs for distance in self.distances)

    @property
    def abs_only(self) -> bool:
        """Whether an absolute value is the only term beside S."""
        others = self.shared, self.of_q, self.of_kv
        return self.has_abs and len(self.distances) == 1 and not any(others)

    @property
    def slope_only(self) -> bool:
        """Whether the terms that depend on the key, beside S, are multiples of distances."""
        return bool(self.distances) and not self.has_abs and not self.of_kv

    @property
    def constant_gain(self) -> float | None:
        """The gain, if it is a finite constant."""
        total = 0.0
        for sign, factors, _ in self.gain:
            for number, divides in factors:
                if isinstance(number, str):
                    return None
                sign *= 1 / number if divides else number
            total += sign
        return total if math.isfinite(total) else None


def affine_score(graph: Graph, ranges: IntRanges, sign: int = 0) -> AffineScore | None:
    """The terms of a score; None where it is not affine in S, or nothing would be gained.

    - `sign`: that of q_idx - kv_idx in all pairs that matter, from `distance_sign`.
    """
    found = _AffineBuilder(graph, ranges).build()
    if found is None or not sign:
        return found
    return replace(
        found, distances=tuple(_without_abs(distance, graph, sign) for distance in found.distances)
    )


def _without_abs(distance: Distance, graph: Graph, distance_sign: int) -> Distance:
    """The same for pairs of one sign, where the absolute value of a distance is affine."""
    node = graph.nodes[int(distance.of[0][1][1:])] if distance.of[0][1][0] == "%" else None
    if not distance.has_abs or node is None or node.op != "sub":
        return distance
    if set(node.args) != {"q_idx", "kv_idx"}:
        return distance
    sign = distance.sign * distance_sign * (1 if node.args[0] == "q_idx" else -1)
    q, kv = distance.slope
    return Distance(1, distance.factors, ((sign, distance.of[0][1]),), (sign * q, sign * kv), False)


def distance_sign(mask: Graph, ints: Sequence[int]) -> int:
    """1 if a mask keeps only pairs with `kv_idx <= q_idx`, as causal ones; -1 if only pairs with
    `kv_idx >= q_idx`; else 0.

    - `ints`: the integers that it captures.
    """
    known = slopes(mask)
    names = [i.name for i in mask.inputs if i.name[0] == "n"]
    values = {"q_idx": 0, "kv_idx": 0} | dict(zip(names, ints, strict=True))

    def at_zero(arg: Arg) -> int | None:
        """The value of an affine integer where both positions are 0."""
        if not isinstance(arg, str) or arg[0] != "%":
            return values.get(arg) if isinstance(arg, str) else int(arg)
        node = mask.nodes[int(arg[1:])]
        args = [at_zero(a) for a in node.args] if node.op in _AFFINE_OPS else [None]
        found = [a for a in args if a is not None]
        return _AFFINE_OPS[node.op](*found) if len(found) == len(args) else None

    def slope(arg: Arg) -> tuple[int, int] | None:
        return known.get(arg) if isinstance(arg, str) else (0, 0)

    def sign_of(name: Arg) -> int:
        node = mask.nodes[int(name[1:])] if isinstance(name, str) and name[0] == "%" else None
        if node is not None and node.op == "and" and node.dtype == "bool":
            return next(filter(None, map(sign_of, node.args)), 0)
        if node is None or node.op not in ("le", "lt", "ge", "gt"):
            return 0
        a, b = node.args if node.op in ("le", "lt") else node.args[::-1]
        slope_a, slope_b, at_a, at_b = slope(a), slope(b), at_zero(a), at_zero(b)
        if slope_a is None or slope_b is None or at_a is None or at_b is None:
            return 0
        # a - b = q (q_idx - kv_idx) + c with c >= 0, and the mask keeps a - b <= 0.
        q, kv = slope_a[0] - slope_b[0], slope_a[1] - slope_b[1]
        return (q < 0) - (q > 0) if q == -kv and at_a >= at_b else 0

    return sign_of(mask.outputs[0])


_AFFINE_OPS: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "to": operator.pos,
}  # fmt: skip


class _NotAffine(Exception):
    """The score is not affine in S, or a term varies by pair."""


class _AffineBuilder:
    def __init__(self, graph: Graph, ranges: IntRanges) -> None:
        self.graph, self.ranges = graph, ranges
        self.kinds, self.slopes = kinds(graph), slopes(graph)
        self.has_score = {"score"}
        for n, node in enumerate(graph.nodes):
            if any(a in self.has_score for a in node.args):
                self.has_score.add(f"%{n}")
        self.distances: list[Distance] = []
        self.terms: dict[str, list[Term]] = {"gain": [], "one": [], "rows": [], "cols": []}

    def build(self) -> AffineScore | None:
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
        """The terms that sum to this one. `with_score`: only terms with S are split."""
        sign, factors, value = term
        node = self._node(value)
        if node is None or node.dtype != "f32" or (with_score and value not in self.has_score):
            return [term]
        more: Sequence[Term] = ()
        if node.op in ("add", "sub"):
            a, b = node.args
            more = Term(sign, factors, a), Term(sign if node.op == "add" else -sign, factors, b)
        elif node.op == "neg":
            more = (Term(-sign, factors, node.args[0]),)
        elif node.op == "mul":
            for number, rest in (node.args, node.args[::-1]):
                if self._kind(number) == "one":
                    more = (Term(sign, (*factors, (number, False)), rest),)
        elif node.op == "div" and self._has_reciprocal(node.args[1]):
            more = (Term(sign, (*factors, (node.args[1], True)), node.args[0]),)
        elif node.op == "to" and self._dtype(node.args[0]) == "f32":
            more = (Term(sign, factors, node.args[0]),)
        if not more:
            return [term]
        return [x for m in more for x in self._terms(m, with_score)]

    def _add(self, term: Term) -> None:
        """Add a term without S: as distances, or by its dependence."""
        if self._add_distances(term):
            return
        kind = self._kind(term.value)
        if kind not in self.terms:
            raise _NotAffine
        self.terms[kind].append(term)

    def _add_distances(self, term: Term) -> bool:
        """Add a term to the distances, if it is a sum of multiples of affine integers and of
        numbers that all pairs share. Integers with the same factors are summed as integers, since
        they may cancel."""
        found: dict[tuple, list[tuple[int, str]]] = {}
        shared = []
        for piece in self._terms(term, with_score=False):
            integer, has_abs = self._affine_integer(piece.value)
            if integer is not None:
                key = (*sorted(piece.factors, key=repr), has_abs)
                found.setdefault(key, []).append((piece.sign, integer))
            elif self._kind(piece.value) == "one":
                shared.append(piece)
            else:
                return False
        distances = []
        for (*factors, has_abs), of in found.items():
            if has_abs and len(of) > 1:
                return False
            sign = of[0][0] if has_abs else 1
            of = [(1, of[0][1])] if has_abs else of
            each = [(s, self.slopes[name]) for s, name in of]
            slope = sum(s * q for s, (q, _) in each), sum(s * kv for s, (_, kv) in each)
            distances.append(Distance(sign, tuple(factors), tuple(of), slope, has_abs))
        if distances:
            self.distances += distances
            self.terms["one"] += shared
        return bool(distances)

    def _affine_integer(self, value: Arg) -> tuple[str | None, bool]:
        """The affine integer that a float is, or None; and whether its absolute value."""
        has_abs = False
        node = self._node(value)
        while node is not None and (node.op == "abs" or (node.op, node.dtype) == ("to", "f32")):
            has_abs |= node.op == "abs"
            value = node.args[0]
            node = self._node(value)
        found = value in self.slopes and self._kind(value) != "one" and self._is_int32(value)
        return (value if found else None), has_abs  # type: ignore[return-value]

    def _is_int32(self, name: Arg) -> bool:
        assert isinstance(name, str)
        return self._dtype(name) == "i64" and self.ranges.type(name) == "tl.int32"

    def _has_reciprocal(self, by: Arg) -> bool:
        return self._kind(by) == "one" and (isinstance(by, str) or 1e-30 < abs(by) < 1e30)

    def _kind(self, arg: Arg) -> str:
        return self.kinds[arg] if isinstance(arg, str) else "one"

    def _node(self, arg: Arg) -> Node | None:
        return self.graph.nodes[int(arg[1:])] if isinstance(arg, str) and arg[0] == "%" else None

    def _dtype(self, arg: Arg) -> str:
        node = self._node(arg)
        if node is not None:
            return node.dtype
        return next((i.dtype for i in self.graph.inputs if i.name == arg and i.ndim is None), "")
