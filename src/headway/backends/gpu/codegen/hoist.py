"""Loop-invariant hoisting: a mask split by the positions that its values depend on.

`ids[q_idx] == ids[kv_idx]` loads one number per query and one per key, and only compares them per
pair; `kv_idx <= q_idx` is a limit per query.

In the register layout of a product every thread has half of a tile's columns: a load by column is
repeated by some sixty threads, after the product has been waited for. So a kernel gets functions of
one position, which it calls earlier and once per column, and a function of pairs that takes their
results.
"""

import operator
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ....mods.graph import Graph
from ....mods.ops import COMPARISONS
from .dependence import slopes
from .int_ranges import IntRanges

# Operations that cost next to nothing to repeat.
_CHEAP = COMPARISONS | {"add", "sub", "neg", "mul", "to", "and", "or", "not", "invert"}
_PAIR = frozenset({"q_idx", "kv_idx"})


class Comparison(NamedTuple):
    """A comparison of affine integers: `sign (a - b) + more <= 0`."""

    name: str
    sign: int
    more: int
    slope: tuple[int, int]  # of `sign (a - b)`: its coefficients of q_idx and kv_idx


class HoistedNames(NamedTuple):
    """The names of the values that are computed before the pairs."""

    shared: tuple[str, ...]  # values that depend on neither position
    of_q: tuple[str, ...]  # values that depend on the query
    of_kv: tuple[str, ...]  # values that depend on the key
    steps: tuple[tuple[Comparison, ...], ...]  # a group holds where its maximum is <= 0


class _HoistSets(NamedTuple):
    """The names of values to hoist, in any order."""

    shared: set[str]
    of_q: set[str]
    of_kv: set[str]
    comparisons: set[str]


def hoist_mask(graph: Graph, ranges: IntRanges | None) -> HoistedNames | None:
    """Return the hoisted values of a mask; None if there are none.

    Loads and all but the cheapest instructions are hoisted, each in the largest expression of the
    same positions.

    - `ranges`: the integer ranges of a graph whose positions are consecutive and small; None:
      comparisons stay per pair.
    """
    return _Hoister(graph, ranges).hoist(graph.outputs)


def hoist_score(graph: Graph, names: Iterable[object]) -> HoistedNames | None:
    """Return the hoisted values from which the values `names` of a score are computed; None if
    there are none."""
    return _Hoister(graph, None).hoist(names)


class _Hoister:
    """Collects the values of a graph that kernels compute before the pairs."""

    def __init__(self, graph: Graph, ranges: IntRanges | None) -> None:
        self.graph = graph
        self.reads = {name: frozenset({name}) for name in _PAIR}
        self.costly: set[str] = set()
        for n, node in enumerate(graph.nodes):
            name, args = f"%{n}", self._args(f"%{n}")
            self.reads[name] = frozenset().union(*(self._reads(a) for a in args))
            if node.op not in _CHEAP or any(a in self.costly and self._reads(a) for a in args):
                self.costly.add(name)
        self.comparisons = {} if ranges is None else _comparisons(graph, ranges)
        self.hoisted = _HoistSets(set(), set(), set(), set())

    def hoist(self, names: Iterable[object]) -> HoistedNames | None:
        """Return the hoisted values from which the values `names` are computed, or None."""
        self._collect(names)
        shared, of_q, of_kv, comparisons = (
            tuple(sorted(values, key=lambda name: int(name[1:]))) for values in self.hoisted
        )
        hoisted = HoistedNames(shared, of_q, of_kv, self._grouped(comparisons))
        return hoisted if any(hoisted) else None

    def _grouped(self, names: Iterable[str]) -> tuple[tuple[Comparison, ...], ...]:
        """Group the comparisons of one conjunction that have the same slope and no other use."""
        uses = Counter(self.graph.outputs)
        for node in self.graph.nodes:
            uses.update(node.args)
        conjunction: dict[str, str] = {}
        for n, node in reversed(list(enumerate(self.graph.nodes))):
            for a in self._args(f"%{n}") if node.op == "and" else ():
                if uses[a] == 1:
                    conjunction[a] = conjunction.get(f"%{n}", f"%{n}")
        groups: dict[object, list[Comparison]] = {}
        for name in names:
            key = conjunction.get(name, name), self.comparisons[name].slope
            groups.setdefault(key, []).append(self.comparisons[name])
        return tuple(map(tuple, groups.values()))

    def _collect(self, names: Iterable) -> None:
        """Collect the values that pairs read in order to compute the values `names`."""
        for name in names:
            reads = self._reads(name)
            if name in self.comparisons:
                self.hoisted.comparisons.add(name)
                self._collect_shared(self._args(name))
            elif name in self.costly and not reads:
                self.hoisted.shared.add(name)
            elif name in self.costly and reads != _PAIR:
                (self.hoisted.of_q if "q_idx" in reads else self.hoisted.of_kv).add(name)
                self._collect_shared(self._args(name))
            else:
                self._collect(self._args(name))

    def _collect_shared(self, names: Iterable) -> None:
        """Collect the values that depend on neither position among the operands of others."""
        for name in names:
            if name in self.costly and not self._reads(name):
                self.hoisted.shared.add(name)
            else:
                self._collect_shared(self._args(name))

    def _args(self, name: object) -> list[str]:
        if not isinstance(name, str) or name[0] != "%":
            return []
        return [a for a in self.graph.nodes[int(name[1:])].args if isinstance(a, str)]

    def _reads(self, name: object) -> frozenset:
        return self.reads.get(name, frozenset()) if isinstance(name, str) else frozenset()


def _comparisons(graph: Graph, ranges: IntRanges) -> dict[str, Comparison]:
    """Return the comparisons of affine integers of a graph, by name."""
    slope_of, comparisons = slopes(graph), {}
    for n, node in enumerate(graph.nodes):
        if node.op not in ("le", "lt", "ge", "gt"):
            continue
        a, b = (slope_of.get(arg) if isinstance(arg, str) else (0, 0) for arg in node.args)
        if a is None or b is None or a == b:
            continue
        # A number that all pairs share may be large: it is clamped to just beyond the other.
        small = [ranges.is_small(arg) for arg in node.args]
        shared = [slope == (0, 0) for slope in (a, b)]
        if not any(small) or not all(map(operator.or_, small, shared)):
            continue
        sign = 1 if node.op in ("le", "lt") else -1
        slope = sign * (a[0] - b[0]), sign * (a[1] - b[1])
        comparisons[f"%{n}"] = Comparison(f"%{n}", sign, int(node.op in ("lt", "gt")), slope)
    return comparisons
