"""A mask taken apart by what its values vary with: `ids[q_idx] == ids[kv_idx]` reads one number per
query and one per key, and only compares them per pair; `kv_idx <= q_idx` is a limit per query.

Where a tile lies in the registers of a product, every thread has half of its columns: what is read
by column there is read sixty times over, and when the product is already waited for. So a kernel is
given functions of one position, which it can call earlier and once per column, and a function of
pairs that takes what they return.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ....mods.graph import COMPARISONS, Graph
from .dependence import slopes
from .int_ranges import Widths

# What costs next to nothing to work out again.
_CHEAP = COMPARISONS | {"add", "sub", "neg", "mul", "to", "and", "or", "not", "invert"}
_PAIR = frozenset({"q_idx", "kv_idx"})


class Step(NamedTuple):
    """A comparison of whole numbers that are linear in the positions: where
    `sign (a - b) + more <= 0`, which grows by `slope` with q_idx and with kv_idx."""

    name: str
    sign: int
    more: int
    slope: tuple[int, int]


class Sides(NamedTuple):
    """Names of the values that are worked out before pairs are: those that depend on neither
    position, on the query at most, and on the key at most; and the comparisons, those together of
    which one number says whether all hold."""

    shared: tuple[str, ...]
    of_q: tuple[str, ...]
    of_kv: tuple[str, ...]
    steps: tuple[tuple[Step, ...], ...]


def sides(graph: Graph, widths: Widths | None) -> Sides | None:
    """What a mask is taken apart into; None where nothing is gained.

    One-sided values are those that are read from memory or take more than the cheapest
    instructions, each as large as it can be. `widths`: of a graph whose positions follow one
    another and are small; else there are no comparisons.
    """
    return _Sides(graph, widths).of(graph.outputs)


def needed(graph: Graph, names: Iterable[object]) -> Sides | None:
    """What some one-sided values of a score are worked out from before pairs are; None where they
    cost next to nothing."""
    return _Sides(graph, None).of(names)


class _Sides:
    def __init__(self, graph: Graph, widths: Widths | None) -> None:
        self.graph = graph
        self.on = {name: frozenset({name}) for name in _PAIR}
        self.dear: set[str] = set()
        for n, node in enumerate(graph.nodes):
            name, args = f"%{n}", self._args(f"%{n}")
            self.on[name] = frozenset().union(*(self._on(a) for a in args))
            if node.op not in _CHEAP or any(a in self.dear and self._on(a) for a in args):
                self.dear.add(name)
        self.steps = {} if widths is None else _steps(graph, widths)
        self.found: list[set[str]] = [set(), set(), set(), set()]

    def of(self, names: Iterable[object]) -> Sides | None:
        self._visit(names)
        shared, of_q, of_kv, steps = (
            tuple(sorted(x, key=lambda a: int(a[1:]))) for x in self.found
        )
        made = Sides(shared, of_q, of_kv, self._together(steps))
        return made if any(made) else None

    def _together(self, steps: Iterable[str]) -> tuple[tuple[Step, ...], ...]:
        """Those of one conjunction that grow alike, and are needed for nothing else, as one."""
        uses = Counter(self.graph.outputs)
        for node in self.graph.nodes:
            uses.update(node.args)
        conjunction: dict[str, str] = {}
        for n, node in reversed(list(enumerate(self.graph.nodes))):
            for a in self._args(f"%{n}") if node.op == "and" else ():
                if uses[a] == 1:
                    conjunction[a] = conjunction.get(f"%{n}", f"%{n}")
        groups: dict[object, list[Step]] = {}
        for name in steps:
            key = conjunction.get(name, name), self.steps[name].slope
            groups.setdefault(key, []).append(self.steps[name])
        return tuple(map(tuple, groups.values()))

    def _visit(self, names: Iterable) -> None:
        """What pairs need, of these values."""
        for name in names:
            on = self._on(name)
            if name in self.steps:
                self.found[3].add(name)
                self._shared(self._args(name))
            elif name in self.dear and on != _PAIR:
                self.found[0 if not on else 1 if "q_idx" in on else 2].add(name)
                self._shared(self._args(name) if on else ())
            else:
                self._visit(self._args(name))

    def _shared(self, names: Iterable) -> None:
        """What one side needs of neither."""
        for name in names:
            if name in self.dear and not self._on(name):
                self.found[0].add(name)
            else:
                self._shared(self._args(name))

    def _args(self, name: object) -> list[str]:
        if not isinstance(name, str) or name[0] != "%":
            return []
        return [a for a in self.graph.nodes[int(name[1:])].args if isinstance(a, str)]

    def _on(self, name: object) -> frozenset:
        return self.on.get(name, frozenset()) if isinstance(name, str) else frozenset()


def _steps(graph: Graph, widths: Widths) -> dict[str, Step]:
    known, found = slopes(graph), {}
    of = lambda a: known.get(a) if isinstance(a, str) else (0, 0)
    for n, node in enumerate(graph.nodes):
        a, *b = map(of, node.args)
        b = b[-1] if b else None
        if node.op not in ("le", "lt", "ge", "gt") or a is None or b is None or a == b:
            continue
        # A number that all pairs share may be large: it is moved to just beyond what the other is.
        small = [widths.below(x) for x in node.args]
        if not all(x or y == (0, 0) for x, y in zip(small, (a, b), strict=True)) or not any(small):
            continue
        sign = 1 if node.op in ("le", "lt") else -1
        slope = sign * (a[0] - b[0]), sign * (a[1] - b[1])
        found[f"%{n}"] = Step(f"%{n}", sign, int(node.op in ("lt", "gt")), slope)
    return found
