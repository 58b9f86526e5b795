"""Key limits: the first and the last key that a mask lets a query see, where the mask says so by
comparing positions.

`kv_idx <= q_idx` is a last key, `q_idx - kv_idx < window` a first one, `kv_idx < lengths[b]` a last
one for each row of the batch, `q_idx // size == kv_idx // size` both. A conjunction takes the
tighter limits, a disjunction the wider ones. What is compared otherwise limits nothing. So a kernel
that asks for limits visits no key in vain, and no tiles are built for it.
"""

from functools import lru_cache
from typing import NamedTuple

from ....mods.graph import COMPARISONS, Arg, Graph, Node, parse
from .function import Function, Text

_FAR = 1 << 40  # beyond every position
_FLIPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
_NEGATED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le"}


class _Range(NamedTuple):
    """The first and the last key: names, or None where the side is open."""

    first: str | None
    last: str | None


class _Limited(NamedTuple):
    """- `keys`: None: any.
    - `known`: whether these keys are all and only those that the mask keeps.
    """

    keys: _Range | None
    known: bool


_ANY = _Limited(None, True)
_UNKNOWN = _Limited(None, False)


class Limits(Function):
    """The function `limits(b, h, q_idx, captured)` of a mask: the first and the last key that each
    query may see, int64 in the shape of `q_idx`; first > last where it sees none.

    `known`: whether the mask keeps all keys between them. (Otherwise, as with
    `causal() & document(ids)` or `sliding_window(n) | prefix(m)`, it may keep far fewer.)
    """

    def __init__(self, graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> None:
        super().__init__("limits", graph, text, wide_offsets)
        self.reads_keys = {"kv_idx"}
        for n, node in enumerate(graph.nodes):
            if any(a in self.reads_keys for a in node.args):
                self.reads_keys.add(f"%{n}")
        self._body(graph.nodes)
        # Comparisons are taken at key 0.
        self.values[:0] = [("", "kv_idx = q_idx * 0"), ("", "zero = tl.cast(q_idx, tl.int64) * 0")]
        self.keys, self.known = self._limit(graph.outputs[0])

    def source(self) -> str | None:
        """The text of the function; None if nothing is limited."""
        if self.keys is None:
            return None
        first, last = self.keys
        result = f"zero + ({first or -_FAR}), zero + ({last or _FAR})"
        return self._text(f"({result})", ("b", "h", "q_idx"))

    def _limit(self, arg: Arg) -> _Limited:
        """The limits of a boolean."""
        if not isinstance(arg, str):
            return _ANY if arg else self._where("False")
        if arg not in self.reads_keys:
            return self._where(self._arg(arg, "bool"))
        node = self.graph.nodes[int(arg[1:])]
        if node.op in ("and", "or", "mul", "add", "min", "max") and node.dtype == "bool":
            return self._joined(node)
        if node.op in ("not", "invert"):
            below = node.args[0]
            inner = self.graph.nodes[int(below[1:])] if isinstance(below, str) else None
            return _UNKNOWN if inner is None else self._compared(inner, _NEGATED.get(inner.op))
        return self._compared(node, node.op)

    def _joined(self, node: Node) -> _Limited:
        """The limits of a conjunction or a disjunction."""
        a, b = map(self._limit, node.args)
        if node.op in ("and", "mul", "min"):
            if a.keys is None or b.keys is None:
                return _Limited(a.keys or b.keys, a.known and b.known)
            return _Limited(self._both(a.keys, b.keys), a.known and b.known)
        keys = None
        if a.keys is not None and b.keys is not None:
            ends = []
            for pick, x, y in zip(("minimum", "maximum"), a.keys, b.keys, strict=True):
                ends.append(None if None in (x, y) else f"tl.{pick}({x}, {y})")
            keys = self._named(*ends)
        return _Limited(keys, False)

    def _both(self, a: _Range, b: _Range) -> _Range:
        """The keys that are in both."""
        ends = []
        for pick, of_a, of_b in zip(("maximum", "minimum"), a, b, strict=True):
            ends.append(of_a or of_b if None in (of_a, of_b) else f"tl.{pick}({of_a}, {of_b})")
        return self._named(*ends)

    def _where(self, condition: str) -> _Limited:
        """All keys where a condition that reads none holds, else none."""
        ends = (
            f"tl.where({condition}, zero {sign} {_FAR}, zero {other} {_FAR})"
            for sign, other in ("-+", "+-")
        )
        return _Limited(self._named(*ends), True)

    def _compared(self, node: Node, op: str | None) -> _Limited:
        """The limits of a comparison of integers, one side of which grows with the key by a
        constant, or is such a number divided."""
        if node.op not in COMPARISONS or op not in _FLIPPED:
            return _UNKNOWN
        a, b = node.args
        if self._dtype(node) not in ("i64", "i32"):
            return _UNKNOWN
        for moving, still, how in ((a, b, op), (b, a, _FLIPPED[op])):
            if still in self.reads_keys:
                continue
            below = self.graph.nodes[int(moving[1:])] if moving[0] == "%" else None  # type: ignore[index]
            if below is not None and below.op == "floordiv":
                top, by = below.args
                return _UNKNOWN if by in self.reads_keys else self._solved(top, still, how, by)
            return self._solved(moving, still, how)
        return self._solved_difference(a, b, op)

    def _solved_difference(self, a: Arg, b: Arg, op: str) -> _Limited:
        """The limits of a comparison both sides of which grow with the key."""
        slopes = self._slope(a), self._slope(b)
        if None in slopes or not (self.ranges.is_small(a) and self.ranges.is_small(b)):
            return _UNKNOWN
        at = f"{self._wide(a)} - {self._wide(b)}"
        return self._bounded(slopes[0] - slopes[1], at, "0", op)  # type: ignore[operator]

    def _solved(self, moving: Arg, still: Arg, op: str, by: Arg | None = None) -> _Limited:
        """The limits of `moving op still`, or of `moving // by op still`."""
        slope = self._slope(moving)
        if slope is None or not self.ranges.is_small(moving):
            return _UNKNOWN
        at, bound = self._wide(moving), self._wide(still)
        if by is None:
            return self._bounded(slope, at, bound, op)
        if not self.ranges.is_small(by):
            return _UNKNOWN
        size = self._wide(by)
        # For a size > 0, moving // size <= x exactly where moving < (x + 1) size, and >= x where
        # moving >= x size.
        ends: dict[str, tuple[tuple[str, str], ...]] = {
            "le": ((f"({bound} + 1) * {size}", "lt"),), "lt": ((f"{bound} * {size}", "lt"),),
            "ge": ((f"{bound} * {size}", "ge"),), "gt": ((f"({bound} + 1) * {size}", "ge"),),
        }  # fmt: skip
        ends["eq"] = ends["ge"] + ends["le"]
        found = [self._bounded(slope, at, f"({end})", how).keys for end, how in ends[op]]
        keys = found[0]
        assert keys is not None
        if len(found) == 2:
            assert found[1] is not None
            keys = self._both(keys, found[1])
        if isinstance(by, str):  # a divisor that is not known yet may be no size
            ends_ = (
                None if x is None else f"tl.where({size} > 0, {x}, zero + ({far}))"
                for x, far in zip(keys, (-_FAR, _FAR), strict=True)
            )  # fmt: skip
            return _Limited(self._named(*ends_), True)
        return _Limited(keys, True) if by > 0 else _UNKNOWN

    def _bounded(self, slope: int, at: str, bound: str, op: str) -> _Limited:
        """The limits of `at + slope * kv_idx op bound`."""
        if slope == 0:
            return _UNKNOWN
        if slope < 0:
            slope, at, bound, op = -slope, f"-({at})", f"-({bound})", _FLIPPED[op]
        room = f"({bound} - ({at}))"
        floor, ceil = room, room
        if slope > 1:
            floor = f"maths.floordiv({room}, {slope})"
            ceil = f"(-maths.floordiv(-{room}, {slope}))"
        first = last = None
        if op in ("le", "eq"):
            last = floor
        elif op == "lt":
            last = f"{ceil} - 1"
        if op in ("ge", "eq"):
            first = ceil
        elif op == "gt":
            first = f"{floor} + 1"
        return _Limited(self._named(first, last), True)

    def _slope(self, arg: Arg) -> int | None:
        """By how much an integer grows from key to key, if that is a constant."""
        if arg == "kv_idx":
            return 1
        if not isinstance(arg, str) or arg not in self.reads_keys:
            return 0
        node = self.graph.nodes[int(arg[1:])]
        if node.dtype not in ("i64", "i32"):
            return None
        if node.op == "mul":
            for number, other in (node.args, node.args[::-1]):
                if isinstance(number, int) and (found := self._slope(other)) is not None:
                    return number * found
            return None
        of = [self._slope(a) for a in node.args]
        if None in of or node.op not in ("add", "sub", "neg", "to"):
            return None
        first, *last = of
        assert first is not None
        if node.op in ("neg", "to"):
            return -first if node.op == "neg" else first
        assert last[0] is not None
        return first + last[0] if node.op == "add" else first - last[0]

    def _wide(self, arg: Arg) -> str:
        """A small integer, or one clamped for the comparison with small ones, as int64."""
        return f"tl.cast({self._small_integer(arg)}, tl.int64)"

    def _named(self, first: str | None, last: str | None) -> _Range:
        """New lines of the function, for the sides that are not open."""
        n, names = len(self.values), []
        for name, value in ((f"first{n}", first), (f"last{n}", last)):
            names.append(None if value is None else name)
            self.values += [] if value is None else [("", f"{name} = {value}")]
        return _Range(*names)


@lru_cache(maxsize=1024)
def is_range(mask: str) -> bool:
    """Whether a mask, given as text, keeps all keys between two limits, and no others."""
    graph = parse(mask)
    return Limits(graph, Text(None, mask), (False,) * len(graph.tensors)).known
