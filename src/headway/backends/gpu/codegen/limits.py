"""Key limits: the first and the last key that a mask lets a query see.

They follow from comparisons of positions: `kv_idx <= q_idx` bounds the last key,
`q_idx - kv_idx < window` the first, `kv_idx < lengths[b]` the last one of each batch row, and
`q_idx // size == kv_idx // size` both. A conjunction takes the tighter limits, a disjunction the
wider ones. Other conditions limit nothing. A kernel that knows the limits needs no block mask: it
visits only the keys between them.
"""

from functools import lru_cache
from typing import NamedTuple

from ....mods.graph import Arg, Graph, Node, parse
from ....mods.ops import COMPARISONS
from .function import FunctionEmitter
from .spec import CodegenSpec

_FAR = 1 << 40  # beyond every position
_FLIPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
_NEGATED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le"}


class _KeyRange(NamedTuple):
    """The names of the first and the last key; None where the side is open."""

    first: str | None
    last: str | None


class _KeyLimits(NamedTuple):
    """The keys that a condition keeps.

    - `keys`: a range that contains them; None: any.
    - `exact`: the condition keeps every key of the range.
    """

    keys: _KeyRange | None
    exact: bool


_ALL = _KeyLimits(None, True)
_UNKNOWN = _KeyLimits(None, False)


class KeyLimitsEmitter(FunctionEmitter):
    """The emitter of the function `limits(b, h, q_idx, captured)` of a mask.

    The function returns the first and the last key that each query may see, int64 in the shape of
    `q_idx`; first > last if it sees none.

    - `exact`: whether the mask keeps all keys between them. Other masks, such as
      `causal() & document(ids)` or `sliding_window(n) | prefix(m)`, may keep far fewer.
    """

    def __init__(
        self, graph: Graph, codegen_spec: CodegenSpec, wide_offsets: tuple[bool, ...]
    ) -> None:
        super().__init__("limits", graph, codegen_spec, wide_offsets)
        self.reads_keys = {"kv_idx"}
        for n, node in enumerate(graph.nodes):
            if any(a in self.reads_keys for a in node.args):
                self.reads_keys.add(f"%{n}")
        self._lower_nodes(graph.nodes)
        # Comparisons are evaluated at key 0.
        self.statements[:0] = [
            ("", "kv_idx = q_idx * 0"),
            ("", "zero = tl.cast(q_idx, tl.int64) * 0"),
        ]
        self.keys, self.exact = self._limits_of(graph.outputs[0])

    def emit_limits(self) -> str | None:
        """Emit the function; None if the mask limits nothing."""
        if self.keys is None:
            return None
        first, last = self.keys
        result = f"zero + ({first or -_FAR}), zero + ({last or _FAR})"
        return self._function_source(f"({result})", ("b", "h", "q_idx"))

    def _limits_of(self, condition: Arg) -> _KeyLimits:
        """Return the limits of a boolean value."""
        if not isinstance(condition, str):
            return _ALL if condition else self._all_where("False")
        if condition not in self.reads_keys:
            return self._all_where(self._operand(condition, "bool"))
        node = self.graph.nodes[int(condition[1:])]
        if node.op in ("and", "or", "mul", "add", "min", "max") and node.dtype == "bool":
            return self._limits_of_junction(node)
        if node.op in ("not", "invert"):
            (operand,) = node.args
            negated = self.graph.nodes[int(operand[1:])] if isinstance(operand, str) else None
            if negated is None:
                return _UNKNOWN
            return self._limits_of_comparison(negated, _NEGATED.get(negated.op))
        return self._limits_of_comparison(node, node.op)

    def _limits_of_junction(self, node: Node) -> _KeyLimits:
        """Return the limits of a conjunction or a disjunction."""
        a, b = map(self._limits_of, node.args)
        if node.op in ("and", "mul", "min"):
            if a.keys is None or b.keys is None:
                return _KeyLimits(a.keys or b.keys, a.exact and b.exact)
            return _KeyLimits(self._intersection(a.keys, b.keys), a.exact and b.exact)
        if a.keys is None or b.keys is None:
            return _UNKNOWN
        return _KeyLimits(self._union(a.keys, b.keys), False)

    def _intersection(self, a: _KeyRange, b: _KeyRange) -> _KeyRange:
        """Return the keys that are in both ranges."""
        ends = []
        for op, end_a, end_b in zip(("maximum", "minimum"), a, b, strict=True):
            one_open = None in (end_a, end_b)
            ends.append(end_a or end_b if one_open else f"tl.{op}({end_a}, {end_b})")
        return self._named(*ends)

    def _union(self, a: _KeyRange, b: _KeyRange) -> _KeyRange:
        """Return the smallest range that contains both."""
        ends = []
        for op, end_a, end_b in zip(("minimum", "maximum"), a, b, strict=True):
            ends.append(None if None in (end_a, end_b) else f"tl.{op}({end_a}, {end_b})")
        return self._named(*ends)

    def _all_where(self, condition: str) -> _KeyLimits:
        """Return all keys where a condition that reads no key holds, else none."""
        ends = (
            f"tl.where({condition}, zero {sign} {_FAR}, zero {opposite} {_FAR})"
            for sign, opposite in ("-+", "+-")
        )
        return _KeyLimits(self._named(*ends), True)

    def _limits_of_comparison(self, node: Node, op: str | None) -> _KeyLimits:
        """Return the limits of a comparison of integers.

        One side must be affine in the key, or such a number divided; or both sides affine.
        """
        if node.op not in COMPARISONS or op not in _FLIPPED:
            return _UNKNOWN
        if self._operand_dtype(node) not in ("i64", "i32"):
            return _UNKNOWN
        a, b = node.args
        for moving, fixed, side_op in ((a, b, op), (b, a, _FLIPPED[op])):
            if fixed in self.reads_keys:
                continue
            is_node = isinstance(moving, str) and moving[0] == "%"
            quotient = self.graph.nodes[int(moving[1:])] if is_node else None  # type: ignore[index]
            if quotient is not None and quotient.op == "floordiv":
                dividend, divisor = quotient.args
                if divisor in self.reads_keys:
                    return _UNKNOWN
                return self._solve_quotient(dividend, divisor, fixed, side_op)
            return self._solve(moving, fixed, side_op)
        return self._solve_difference(a, b, op)

    def _solve_difference(self, a: Arg, b: Arg, op: str) -> _KeyLimits:
        """Return the limits of `a op b`, both of which vary by key."""
        slope_a, slope_b = self._key_slope(a), self._key_slope(b)
        if slope_a is None or slope_b is None:
            return _UNKNOWN
        if not (self.ranges.is_small(a) and self.ranges.is_small(b)):
            return _UNKNOWN
        return self._solve_linear(
            slope_a - slope_b, f"{self._int64(a)} - {self._int64(b)}", op, "0"
        )

    def _solve(self, moving: Arg, fixed: Arg, op: str) -> _KeyLimits:
        """Return the limits of `moving op fixed`."""
        slope = self._key_slope(moving)
        if slope is None or not self.ranges.is_small(moving):
            return _UNKNOWN
        return self._solve_linear(slope, self._int64(moving), op, self._int64(fixed))

    def _solve_quotient(self, dividend: Arg, divisor: Arg, fixed: Arg, op: str) -> _KeyLimits:
        """Return the limits of `dividend // divisor op fixed`."""
        slope = self._key_slope(dividend)
        if slope is None or not (self.ranges.is_small(dividend) and self.ranges.is_small(divisor)):
            return _UNKNOWN
        at_key_0, bound, size = map(self._int64, (dividend, fixed, divisor))
        # For a size > 0, dividend // size <= x if and only if dividend < (x + 1) size, and >= x if
        # and only if dividend >= x size.
        comparisons: dict[str, tuple[tuple[str, str], ...]] = {
            "le": (("lt", f"({bound} + 1) * {size}"),), "lt": (("lt", f"{bound} * {size}"),),
            "ge": (("ge", f"{bound} * {size}"),), "gt": (("ge", f"({bound} + 1) * {size}"),),
        }  # fmt: skip
        comparisons["eq"] = comparisons["ge"] + comparisons["le"]
        ranges = [
            self._solve_linear(slope, at_key_0, linear_op, f"({end})").keys
            for linear_op, end in comparisons[op]
        ]
        keys = ranges[0]
        assert keys is not None
        if len(ranges) == 2:
            assert ranges[1] is not None
            keys = self._intersection(keys, ranges[1])
        if not isinstance(divisor, str):
            return _KeyLimits(keys, True) if divisor > 0 else _UNKNOWN
        # A divisor that is not a constant may be 0 or negative.
        ends = (
            None if end is None else f"tl.where({size} > 0, {end}, zero + ({far}))"
            for end, far in zip(keys, (-_FAR, _FAR), strict=True)
        )
        return _KeyLimits(self._named(*ends), True)

    def _solve_linear(self, slope: int, at_key_0: str, op: str, bound: str) -> _KeyLimits:
        """Return the limits of `at_key_0 + slope * kv_idx op bound`."""
        if slope == 0:
            return _UNKNOWN
        if slope < 0:
            slope, at_key_0, bound, op = -slope, f"-({at_key_0})", f"-({bound})", _FLIPPED[op]
        difference = f"({bound} - ({at_key_0}))"
        floor, ceil = difference, difference
        if slope > 1:
            floor = f"maths.floordiv({difference}, {slope})"
            ceil = f"(-maths.floordiv(-{difference}, {slope}))"
        first = last = None
        if op in ("le", "eq"):
            last = floor
        elif op == "lt":
            last = f"{ceil} - 1"
        if op in ("ge", "eq"):
            first = ceil
        elif op == "gt":
            first = f"{floor} + 1"
        return _KeyLimits(self._named(first, last), True)

    def _key_slope(self, arg: Arg) -> int | None:
        """Return how much an integer grows from key to key; None if that is not a constant."""
        if arg == "kv_idx":
            return 1
        if not isinstance(arg, str) or arg not in self.reads_keys:
            return 0
        node = self.graph.nodes[int(arg[1:])]
        if node.dtype not in ("i64", "i32"):
            return None
        if node.op == "mul":
            for number, factor in (node.args, node.args[::-1]):
                if isinstance(number, int) and (slope := self._key_slope(factor)) is not None:
                    return number * slope
            return None
        slopes = [self._key_slope(a) for a in node.args]
        if None in slopes or node.op not in ("add", "sub", "neg", "to"):
            return None
        first, *last = slopes
        assert first is not None
        if node.op in ("neg", "to"):
            return -first if node.op == "neg" else first
        assert last[0] is not None
        return first + last[0] if node.op == "add" else first - last[0]

    def _int64(self, arg: Arg) -> str:
        """Return an integer as int64, clamped if it may be larger than what it is compared with."""
        return f"tl.cast({self._small_integer(arg)}, tl.int64)"

    def _named(self, first: str | None, last: str | None) -> _KeyRange:
        """Add statements that name the ends of a range, if they are not open."""
        n, names = len(self.statements), []
        for name, end in ((f"first{n}", first), (f"last{n}", last)):
            names.append(None if end is None else name)
            self.statements += [] if end is None else [("", f"{name} = {end}")]
        return _KeyRange(*names)


@lru_cache(maxsize=1024)
def is_range(mask: str) -> bool:
    """Check that a mask, given as a serialized graph, keeps all keys between two limits."""
    graph = parse(mask)
    wide_offsets = (False,) * len(graph.tensors)
    return KeyLimitsEmitter(graph, CodegenSpec(None, mask), wide_offsets).exact


@lru_cache(maxsize=1024)
def is_packed(mask: str) -> bool:
    """Check that a mask, given as a serialized graph, compares a number that a table holds for the
    query with what another table holds for the key, as that of packed sequences does."""
    graph = parse(mask)
    reads: dict[Arg, tuple[Arg, ...]] = {f"%{n}": node.args for n, node in graph.gathers}
    for node in graph.nodes:
        if node.op == "eq" and all(a in reads for a in node.args):
            (table, *index), (other_table, *other_index) = (reads[a] for a in node.args)
            if table != other_table and {*index, *other_index} == {"q_idx", "kv_idx"}:
                return True
    return False
