"""In which type whole numbers are computed: int64 as the graph says, int32, or float32.

A GPU has no 64-bit integer units, and turns integers into floats at a fraction of the speed of its
other arithmetic. Positions are below `SMALL`, which leaves room for both: what provably stays
within int32 is computed there, and what is only needed as a float32 is computed from positions that
are one already, where that gives the same bits.
"""

from ....mods.graph import POSITIONS, Arg, Graph

SMALL = 1 << 24  # below this every position and captured int is, where `Text.narrow`
_EXACT = 1 << 24  # up to this float32 has every whole number


class Widths:
    """Which int64 values of a graph may be computed in int32: those whose bounds, given those of
    positions and captured ints, stay within it."""

    def __init__(self, graph: Graph, narrow: bool) -> None:
        limit = (-SMALL, SMALL) if narrow else None
        self.bounds: dict[str, tuple[int, int] | None] = {
            i.name: limit for i in graph.inputs if i.ndim is None and i.dtype == "i64"
        }
        self.wide = {name for name in self.bounds if not narrow}
        self._widens: set[int] = set()
        for n, node in enumerate(graph.nodes):
            name = f"%{n}"
            if node.dtype != "i64":
                self.bounds[name] = _SIZES.get(node.dtype)
                continue
            given = [self._of(a) for a in node.args] if node.op != "gather" else [None]
            bounds = None if None in given else _bounds(node.op, given)
            from_wide = any(isinstance(a, str) and a in self.wide for a in node.args)
            self.bounds[name] = bounds
            if bounds is None or max(-bounds[0], bounds[1]) >= 1 << 31 or from_wide:
                self.wide.add(name)
                if not from_wide and node.op not in ("gather", "to"):
                    self._widens.add(n)

    def exact(self, name: str) -> bool:
        """Whether float32 holds every value of it."""
        bounds = self.bounds.get(name)
        return bounds is not None and max(-bounds[0], bounds[1]) <= _EXACT

    def below(self, arg: Arg) -> bool:
        """Whether it is so far below 2^31 that differences of such whole numbers may be moved."""
        bounds = self._of(arg) if not isinstance(arg, float) else None
        return bounds is not None and max(-bounds[0], bounds[1]) < 1 << 29

    def _of(self, arg: Arg) -> tuple[int, int] | None:
        return self.bounds.get(arg) if isinstance(arg, str) else (int(arg), int(arg))

    def type(self, name: str) -> str:
        return "tl.int64" if name in self.wide else "tl.int32"

    def widens(self, n: int) -> bool:
        """Whether node n needs more bits than its operands."""
        return n in self._widens


def as_floats(graph: Graph, widths: Widths, name: str) -> bool:
    """Whether a value, converted to float32, is the same computed in float32 from the positions.

    Sums and products of numbers that float32 holds are rounded once, as the conversion does; a
    sign, a larger or a smaller of such results changes nothing about that.
    """
    if name[0] != "%":
        return (name in POSITIONS or name[0] == "n") and widths.exact(name)
    node = graph.nodes[int(name[1:])]
    operands = [a for a in node.args if isinstance(a, str)]
    if node.op in ("add", "sub", "mul"):
        within = all(map(widths.exact, operands)) and all(
            abs(a) <= _EXACT for a in node.args if not isinstance(a, str)
        )
    else:
        within = node.op in ("neg", "abs", "max", "min")
    return within and all(as_floats(graph, widths, a) for a in operands)


_SIZES = {"bool": (0, 1), "u8": (0, 255), "i8": (-128, 127), "i16": (-32768, 32767),
          "i32": (-(1 << 31), (1 << 31) - 1)}  # fmt: skip


def _bounds(op: str, given: list) -> tuple[int, int] | None:
    """The least and the greatest result for operands within their bounds; None where unknown."""
    (a, b), (c, d) = given[0], given[-1]
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
        size = max(abs(a), abs(b)) + 1
        return -size, size
    if op in ("mod", "fmod"):
        size = max(abs(c), abs(d))
        return -size, size
    if op == "where":
        (e, f) = given[1]
        return min(c, e), max(d, f)
    return None
