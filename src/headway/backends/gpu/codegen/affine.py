"""Scores that are linear in S: T = gain S + what positions add, taken apart by what it depends on.

ALiBi, a bias per key or per query, `1.1 * score + 0.01 * (kv_idx - q_idx)`. Of a tile of pairs,
only a product with S and one sum are left to be done per pair:

    T = gain S + f(q_idx) + g(kv_idx)

with f and g worked out per row and per column. A multiple of a distance is taken apart at a pair
that lies near, where everything is small: with whole numbers L linear in both positions,

    L(q, kv) = L(q, first) + L(0, kv - first) - L(0, 0)

exactly, so that nothing cancels in floats: its error stays within a rounding of the multiple of the
distance and of that of a tile's length. An absolute
value |L| is left to be taken per pair.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ....mods.graph import Arg, Graph, Node
from .dependence import kinds, slopes
from .int_ranges import Widths


class Part(NamedTuple):
    """`sign` times the product of `by` times `value`.

    - `by`: numbers that all pairs share; True: divided by it.
    """

    sign: int
    by: tuple[tuple[Arg, bool], ...]
    value: Arg


class Line(NamedTuple):
    """`sign` times the product of `by` times whole numbers that are linear in the positions.

    - `of`: (sign, the name of a value) of what they are the sum of; `slope`: by how much they grow
      with q_idx and with kv_idx.
    - `bent`: the absolute value of them.
    """

    sign: int
    by: tuple[tuple[Arg, bool], ...]
    of: tuple[tuple[int, str], ...]
    slope: tuple[int, int]
    has_abs: bool


@dataclass(frozen=True)
class Linear:
    """- `gain`: parts whose value is S.
    - `lines`: multiples of distances; at most one absolute value.
    - `shared`, `of_q`, `of_kv`: parts that all pairs share, and those that depend on the query, and
      on the key.
    """

    gain: tuple[Part, ...]
    lines: tuple[Line, ...]
    shared: tuple[Part, ...]
    of_q: tuple[Part, ...]
    of_kv: tuple[Part, ...]

    @property
    def has_abs(self) -> bool:
        """Whether there is an absolute value."""
        return any(line.has_abs for line in self.lines)

    @property
    def abs_only(self) -> bool:
        """Whether there is nothing but an absolute value beside S."""
        others = self.shared, self.of_q, self.of_kv
        return self.has_abs and len(self.lines) == 1 and not any(others)

    @property
    def slope_only(self) -> bool:
        """Whether all that depends on the key, beside S, is multiples of distances."""
        return bool(self.lines) and not self.has_abs and not self.of_kv

    @property
    def constant_gain(self) -> float | None:
        """The gain, if it is of known numbers alone, and finite."""
        total = 0.0
        for sign, by, _ in self.gain:
            for number, over in by:
                if isinstance(number, str):
                    return None
                sign *= 1 / number if over else number
            total += sign
        return total if math.isfinite(total) else None


def linear(graph: Graph, widths: Widths, side: int = 0) -> Linear | None:
    """A score taken apart; None where it is not of this kind, or nothing would be gained.

    - `side`: of the pairs that matter, from `side`.
    """
    found = _Linear(graph, widths).whole()
    if found is None or not side:
        return found
    return replace(found, lines=tuple(_straight(line, graph, side) for line in found.lines))


def _straight(line: Line, graph: Graph, side: int) -> Line:
    """The same at pairs of one side, where the absolute value of a distance is a straight line."""
    node = graph.nodes[int(line.of[0][1][1:])] if line.of[0][1][0] == "%" else None
    if not line.has_abs or node is None or node.op != "sub":
        return line
    if set(node.args) != {"q_idx", "kv_idx"}:
        return line
    sign = line.sign * side * (1 if node.args[0] == "q_idx" else -1)
    q, kv = line.slope
    return Line(1, line.by, ((sign, line.of[0][1]),), (sign * q, sign * kv), False)


def distance_sign(mask: Graph, ints: Sequence[int]) -> int:
    """1 where a mask keeps no pair but with `kv_idx <= q_idx`, as causal ones; -1 where none but
    the other way round; else 0.

    - `ints`: the whole numbers that it captures.
    """
    known = slopes(mask)
    names = [i.name for i in mask.inputs if i.name[0] == "n"]
    values = {"q_idx": 0, "kv_idx": 0} | dict(zip(names, ints, strict=True))

    def at_zero(arg: Arg) -> int | None:
        """A whole number that is linear in the positions, where both are 0."""
        if not isinstance(arg, str) or arg[0] != "%":
            return values.get(arg) if isinstance(arg, str) else int(arg)
        node = mask.nodes[int(arg[1:])]
        args = [at_zero(a) for a in node.args] if node.op in _LINEAR else [None]
        whole = [a for a in args if a is not None]
        return _LINEAR[node.op](*whole) if len(whole) == len(args) else None

    def slope(arg: Arg) -> tuple[int, int] | None:
        return known.get(arg) if isinstance(arg, str) else (0, 0)

    def of(name: Arg) -> int:
        node = mask.nodes[int(name[1:])] if isinstance(name, str) and name[0] == "%" else None
        if node is not None and node.op == "and" and node.dtype == "bool":
            return next(filter(None, map(of, node.args)), 0)
        if node is None or node.op not in ("le", "lt", "ge", "gt"):
            return 0
        a, b = node.args if node.op in ("le", "lt") else node.args[::-1]
        of_a, of_b, at, at_b = slope(a), slope(b), at_zero(a), at_zero(b)
        if of_a is None or of_b is None or at is None or at_b is None:
            return 0
        # a - b = q (q_idx - kv_idx) + a number, which is not below 0; and is 0 at most.
        q, kv = of_a[0] - of_b[0], of_a[1] - of_b[1]
        return (q < 0) - (q > 0) if q == -kv and at >= at_b else 0

    return of(mask.outputs[0])


_LINEAR: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "to": operator.pos,
}  # fmt: skip


class _Other(Exception):
    """The score is of another kind."""


class _Linear:
    def __init__(self, graph: Graph, widths: Widths) -> None:
        self.graph, self.widths = graph, widths
        self.kinds, self.slopes = kinds(graph), slopes(graph)
        self.has_score = {"score"}
        for n, node in enumerate(graph.nodes):
            if any(a in self.has_score for a in node.args):
                self.has_score.add(f"%{n}")
        self.lines: list[Line] = []
        self.parts: dict[str, list[Part]] = {"gain": [], "one": [], "rows": [], "cols": []}

    def whole(self) -> Linear | None:
        try:
            for part in self._sum(Part(1, (), self.graph.outputs[0]), with_score=True):
                if part.value == "score":
                    self.parts["gain"].append(part)
                elif part.value in self.has_score:
                    raise _Other
                else:
                    self._position(part)
        except _Other:
            return None
        gain, shared, of_q, of_kv = map(tuple, self.parts.values())
        if not gain or sum(line.has_abs for line in self.lines) > 1:
            return None
        return Linear(gain, tuple(self.lines), shared, of_q, of_kv)

    def _sum(self, part: Part, with_score: bool) -> list[Part]:
        """The parts that this one is the sum of; `with_score`: as long as there is S in them."""
        sign, by, value = part
        node = self._node(value)
        if node is None or node.dtype != "f32" or (with_score and value not in self.has_score):
            return [part]
        more: Sequence[Part] = ()
        if node.op in ("add", "sub"):
            a, b = node.args
            more = Part(sign, by, a), Part(sign if node.op == "add" else -sign, by, b)
        elif node.op == "neg":
            more = (Part(-sign, by, node.args[0]),)
        elif node.op == "mul":
            for number, rest in (node.args, node.args[::-1]):
                if self._kind(number) == "one":
                    more = (Part(sign, (*by, (number, False)), rest),)
        elif node.op == "div" and self._divides(node.args[1]):
            more = (Part(sign, (*by, (node.args[1], True)), node.args[0]),)
        elif node.op == "to" and self._dtype(node.args[0]) == "f32":
            more = (Part(sign, by, node.args[0]),)
        if not more:
            return [part]
        return [x for m in more for x in self._sum(m, with_score)]

    def _position(self, part: Part) -> None:
        """Put a part without S where it belongs."""
        kind = self._kind(part.value)
        if self._lines(part):
            return
        if kind not in self.parts:
            raise _Other
        self.parts[kind].append(part)

    def _lines(self, part: Part) -> bool:
        """Put it among the lines if it is multiples of whole numbers that are linear in the
        positions, and numbers that all pairs share. What has the same factors is added as whole
        numbers, as it may cancel."""
        found: dict[tuple, list[tuple[int, str]]] = {}
        shared = []
        for piece in self._sum(part, with_score=False):
            whole, has_abs = self._whole(piece.value)
            if whole is not None:
                key = (*sorted(piece.by, key=repr), has_abs)
                found.setdefault(key, []).append((piece.sign, whole))
            elif self._kind(piece.value) == "one":
                shared.append(piece)
            else:
                return False
        lines = []
        for (*by, has_abs), of in found.items():
            if has_abs and len(of) > 1:
                return False
            sign = of[0][0] if has_abs else 1
            of = [(1, of[0][1])] if has_abs else of
            each = [(s, self.slopes[w]) for s, w in of]
            slope = sum(s * q for s, (q, _) in each), sum(s * kv for s, (_, kv) in each)
            lines.append(Line(sign, tuple(by), tuple(of), slope, has_abs))
        if lines:
            self.lines += lines
            self.parts["one"] += shared
        return bool(lines)

    def _whole(self, value: Arg) -> tuple[str | None, bool]:
        """The whole number that a float is, if that is linear in the positions; and whether its
        absolute value."""
        has_abs = False
        node = self._node(value)
        while node is not None and (node.op == "abs" or (node.op, node.dtype) == ("to", "f32")):
            has_abs |= node.op == "abs"
            value = node.args[0]
            node = self._node(value)
        found = value in self.slopes and self._kind(value) != "one" and self._small(value)
        return (value if found else None), has_abs  # type: ignore[return-value]

    def _small(self, name: Arg) -> bool:
        assert isinstance(name, str)
        return self._dtype(name) == "i64" and self.widths.type(name) == "tl.int32"

    def _divides(self, by: Arg) -> bool:
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
