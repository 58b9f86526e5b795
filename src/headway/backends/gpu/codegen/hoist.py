"""Loop-invariant hoisting: a mask split by what its values depend on. `ids[q_idx] == ids[kv_idx]`
loads one number per query and one per key, and only compares them per pair; `kv_idx <= q_idx` is a
limit per query.

In the register layout of a product every thread has half of a tile's columns: a load by column is
repeated by some sixty threads, after the product has been waited for. So a kernel gets functions of
one position, which it calls earlier and once per column, and a function of pairs that takes their
results.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ....mods.graph import COMPARISONS, Graph
from .dependence import slopes
from .int_ranges import IntRanges

# Operations that cost next to nothing to repeat.
_CHEAP = COMPARISONS | {"add", "sub", "neg", "mul", "to", "and", "or", "not", "invert"}
_PAIR = frozenset({"q_idx", "kv_idx"})


class Comparison(NamedTuple):
    """A comparison of integers that are affine in the positions: `sign (a - b) + more <= 0`."""

    name: str
    sign: int
    more: int
    slope: tuple[int, int]  # of `sign (a - b)`: its coefficients of q_idx and kv_idx


class Hoisted(NamedTuple):
    """The names of the values that are computed before pairs are."""

    shared: tuple[str, ...]  # that depend on neither position
    of_q: tuple[str, ...]  # that depend on the query
    of_kv: tuple[str, ...]  # that depend on the key
    steps: tuple[tuple[Comparison, ...], ...]  # those of a group hold where one maximum is <= 0


def hoist_mask(graph: Graph, ranges: IntRanges | None) -> Hoisted | None:
    """The hoisted values of a mask; None where nothing is gained.

    Values that are loaded or take more than the cheapest instructions are hoisted, each as large as
    it can be.

    - `ranges`: of a graph whose positions are consecutive and small; None: comparisons stay per
      pair.
    """
    return _Hoister(graph, ranges).hoist(graph.outputs)


def hoist_score(graph: Graph, names: Iterable[object]) -> Hoisted | None:
    """The hoisted values of a score from which the values `names` are computed; None where those
    cost next to nothing."""
    return _Hoister(graph, None).hoist(names)


class _Hoister:
    def __init__(self, graph: Graph, ranges: IntRanges | None) -> None:
        self.graph = graph
        self.reads = {name: frozenset({name}) for name in _PAIR}
        self.costly: set[str] = set()
        for n, node in enumerate(graph.nodes):
            name, args = f"%{n}", self._args(f"%{n}")
            self.reads[name] = frozenset().union(*(self._reads(a) for a in args))
            if node.op not in _CHEAP or any(a in self.costly and self._reads(a) for a in args):
                self.costly.add(name)
        self.steps = {} if ranges is None else _comparisons(graph, ranges)
        self.found: list[set[str]] = [set(), set(), set(), set()]

    def hoist(self, names: Iterable[object]) -> Hoisted | None:
        self._visit(names)
        shared, of_q, of_kv, steps = (
            tuple(sorted(x, key=lambda a: int(a[1:]))) for x in self.found
        )
        made = Hoisted(shared, of_q, of_kv, self._merged(steps))
        return made if any(made) else None

    def _merged(self, steps: Iterable[str]) -> tuple[tuple[Comparison, ...], ...]:
        """Comparisons of one conjunction that have the same slope and no other use form a group."""
        uses = Counter(self.graph.outputs)
        for node in self.graph.nodes:
            uses.update(node.args)
        conjunction: dict[str, str] = {}
        for n, node in reversed(list(enumerate(self.graph.nodes))):
            for a in self._args(f"%{n}") if node.op == "and" else ():
                if uses[a] == 1:
                    conjunction[a] = conjunction.get(f"%{n}", f"%{n}")
        groups: dict[object, list[Comparison]] = {}
        for name in steps:
            key = conjunction.get(name, name), self.steps[name].slope
            groups.setdefault(key, []).append(self.steps[name])
        return tuple(map(tuple, groups.values()))

    def _visit(self, names: Iterable) -> None:
        """Find what pairs need of these values."""
        for name in names:
            reads = self._reads(name)
            if name in self.steps:
                self.found[3].add(name)
                self._shared(self._args(name))
            elif name in self.costly and reads != _PAIR:
                self.found[0 if not reads else 1 if "q_idx" in reads else 2].add(name)
                self._shared(self._args(name) if reads else ())
            else:
                self._visit(self._args(name))

    def _shared(self, names: Iterable) -> None:
        """Find what the values of one position need of those of neither."""
        for name in names:
            if name in self.costly and not self._reads(name):
                self.found[0].add(name)
            else:
                self._shared(self._args(name))

    def _args(self, name: object) -> list[str]:
        if not isinstance(name, str) or name[0] != "%":
            return []
        return [a for a in self.graph.nodes[int(name[1:])].args if isinstance(a, str)]

    def _reads(self, name: object) -> frozenset:
        return self.reads.get(name, frozenset()) if isinstance(name, str) else frozenset()


def _comparisons(graph: Graph, ranges: IntRanges) -> dict[str, Comparison]:
    known, found = slopes(graph), {}
    of = lambda a: known.get(a) if isinstance(a, str) else (0, 0)
    for n, node in enumerate(graph.nodes):
        a, *b = map(of, node.args)
        b = b[-1] if b else None
        if node.op not in ("le", "lt", "ge", "gt") or a is None or b is None or a == b:
            continue
        # A number that all pairs share may be large: it is clamped to just beyond the other.
        small = [ranges.is_small(x) for x in node.args]
        if not all(x or y == (0, 0) for x, y in zip(small, (a, b), strict=True)) or not any(small):
            continue
        sign = 1 if node.op in ("le", "lt") else -1
        slope = sign * (a[0] - b[0]), sign * (a[1] - b[1])
        found[f"%{n}"] = Comparison(f"%{n}", sign, int(node.op in ("lt", "gt")), slope)
    return found
