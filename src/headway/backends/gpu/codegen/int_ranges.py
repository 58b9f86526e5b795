"""Integer range analysis: integers are int64 in a graph, and computed in int32 or float32 where
that provably gives the same result.

A GPU has no 64-bit integer units, and converts integers to floats at a fraction of the speed of its
other arithmetic. Positions are below `POSITION_LIMIT`, which leaves room for both: values that stay
within int32 are computed in int32, and values that are only needed as float32 are computed from
positions converted once, where that gives the same bits.
"""

from ....mods.graph import POSITIONS, Arg, Graph

POSITION_LIMIT = 1 << 24  # every position and captured int is below it, if `CodegenSpec.narrow`
_FLOAT32_INTEGERS = 1 << 24  # float32 represents every integer up to it


class IntRanges:
    """The bounds of a graph's integers, from those of positions and captured integers.

    int64 values whose bounds stay within int32 may be computed in int32.
    """

    def __init__(self, graph: Graph, narrow: bool) -> None:
        limit = (-POSITION_LIMIT, POSITION_LIMIT) if narrow else None
        self.bounds: dict[str, tuple[int, int] | None] = {
            i.name: limit for i in graph.inputs if i.ndim is None and i.dtype == "i64"
        }
        self.wide = {name for name in self.bounds if not narrow}
        self._widening: set[int] = set()
        for n, node in enumerate(graph.nodes):
            name = f"%{n}"
            if node.dtype != "i64":
                self.bounds[name] = _DTYPE_RANGES.get(node.dtype)
                continue
            operands = [self._of(a) for a in node.args] if node.op != "gather" else [None]
            bounds = None if None in operands else _bounds(node.op, operands)
            from_wide = any(isinstance(a, str) and a in self.wide for a in node.args)
            self.bounds[name] = bounds
            if bounds is None or max(-bounds[0], bounds[1]) >= 1 << 31 or from_wide:
                self.wide.add(name)
                if not from_wide and node.op not in ("gather", "to"):
                    self._widening.add(n)

    def exact(self, name: str) -> bool:
        """Check that float32 represents each value of an integer."""
        bounds = self.bounds.get(name)
        return bounds is not None and max(-bounds[0], bounds[1]) <= _FLOAT32_INTEGERS

    def is_small(self, arg: Arg) -> bool:
        """Check that an integer is below 2^29: sums of a few such integers stay within int32."""
        bounds = self._of(arg) if not isinstance(arg, float) else None
        return bounds is not None and max(-bounds[0], bounds[1]) < 1 << 29

    def _of(self, arg: Arg) -> tuple[int, int] | None:
        return self.bounds.get(arg) if isinstance(arg, str) else (int(arg), int(arg))

    def type(self, name: str) -> str:
        """Return the type in which an integer is computed."""
        return "tl.int64" if name in self.wide else "tl.int32"

    def widens(self, n: int) -> bool:
        """Check whether node n needs more bits than its operands have."""
        return n in self._widening


def as_floats(graph: Graph, ranges: IntRanges, name: str) -> bool:
    """Check that a value converted to float32 equals the value computed in float32 from positions.

    A sum or product of numbers that float32 represents is rounded once, as by the conversion; a
    negation, absolute value, maximum or minimum of such results is not rounded.
    """
    if name[0] != "%":
        return (name in POSITIONS or name[0] == "n") and ranges.exact(name)
    node = graph.nodes[int(name[1:])]
    operands = [a for a in node.args if isinstance(a, str)]
    if node.op in ("add", "sub", "mul"):
        exact = all(map(ranges.exact, operands)) and all(
            abs(a) <= _FLOAT32_INTEGERS for a in node.args if not isinstance(a, str)
        )
    else:
        exact = node.op in ("neg", "abs", "max", "min")
    return exact and all(as_floats(graph, ranges, a) for a in operands)


_DTYPE_RANGES = {"bool": (0, 1), "u8": (0, 255), "i8": (-128, 127), "i16": (-32768, 32767),
          "i32": (-(1 << 31), (1 << 31) - 1)}  # fmt: skip


def _bounds(op: str, operands: list) -> tuple[int, int] | None:
    """Return the bounds of an op's result from those of its operands; None if unknown."""
    (a, b), (c, d) = operands[0], operands[-1]
    if op == "neg":
        return -b, -a
    if op == "abs":
        return 0, max(-a, b, 0)
    if op in ("to", "sign", "floor", "ceil", "round", "trunc"):
        return a, b
    if op == "add":
        return a + c, b + d
    if op == "sub":
        return a - d, b - c
    if op == "mul":
        products = (a * c, a * d, b * c, b * d)
        return min(products), max(products)
    if op in ("max", "min"):
        pick = max if op == "max" else min
        return pick(a, c), pick(b, d)
    if op in ("floordiv", "truncdiv"):
        magnitude = max(abs(a), abs(b)) + 1
        return -magnitude, magnitude
    if op in ("mod", "fmod"):
        magnitude = max(abs(c), abs(d))
        return -magnitude, magnitude
    if op == "where":
        (e, f) = operands[1]
        return min(c, e), max(d, f)
    return None
