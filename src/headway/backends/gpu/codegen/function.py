"""One graph as one Triton function: a line per operation, the user's source lines as comments."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from ....errors import ModError
from ....mods.graph import FLOATS, POSITIONS, Arg, Graph, Node
from .affine import AffineScore, Distance, Term
from .dependence import dependence_of, kinds
from .formulas import FLOAT_FORMULAS, INFIX, INT_FORMULAS, TYPES
from .hoist import Comparison, Hoisted
from .int_ranges import IntRanges, as_floats


@dataclass(frozen=True)
class Text:
    """The input of code generation, hashable: the key of the cache of generated modules.

    - `score`, `mask`: texts of graphs, or None.
    - `wanted`: which gathers of the score (by node index) want a gradient.
    - `narrow`: positions and captured ints are below `SMALL` in magnitude.
    - `consecutive`: positions are consecutive, and so are the diagonals of a tile.
    - `wide_offsets`: for every captured tensor, the score's then the mask's, whether an offset into
      it may need 64 bits.
    - `approx_tanh`: tanh is the hardware's approximate instruction, wrong by up to 2^-11 of its
      value: a quarter of what rounding P to bfloat16 does.
    - `per_diagonal`: what depends on `kv_idx - q_idx` only is read once per diagonal of a tile; the
      kernel passes its first positions as `captured[2]` (diagonals.py).
    - `affine`: a score that is affine in S is also generated term by term (affine.py).
    - `hoist`: a mask is also generated with its loop-invariant parts hoisted (hoist.py).
    - `bias_tables`: the kernel reads relative biases from tables, and passes the value of every
      pair as `captured[2]`.
    - `distance_sign`: the sign of q_idx - kv_idx in all pairs that the mask keeps, 0 if unknown
      (`affine.distance_sign`).
    - `limits`: the first and the last key that a mask lets a query see are also generated
      (limits.py).
    """

    score: str | None
    mask: str | None
    wanted: tuple[int, ...] = ()
    narrow: bool = True
    consecutive: bool = True
    wide_offsets: tuple[bool, ...] = ()
    approx_tanh: bool = False
    per_diagonal: bool = False
    affine: bool = False
    hoist: bool = False
    bias_tables: bool = False
    distance_sign: int = 0
    limits: bool = False


class Function:
    """The text of a function that evaluates a graph.

    - `wide_offsets`: for every captured tensor, whether an offset into it may need 64 bits.
    """

    def __init__(self, name: str, graph: Graph, text: Text, wide_offsets: tuple[bool, ...]) -> None:
        self.name, self.graph, self.wide_offsets, self.approx_tanh = (
            name,
            graph,
            wide_offsets,
            text.approx_tanh,
        )
        # These functions are called with a tile of pairs; others may get single positions.
        self.per_diagonal = (
            diagonal_gathers(graph) if text.per_diagonal and name in ("score", "derivative") else []
        )
        self.bias_tables = text.bias_tables
        self.ranges, self.kinds = IntRanges(graph, text.narrow), kinds(graph)
        self.dtypes = {i.name: i.dtype for i in graph.inputs if i.ndim is None}
        self.names = {i.name for i in graph.inputs}
        self.values: list[tuple[str, str]] = []  # per node: the user's line, and its text

    def outputs(self) -> str:
        """A function that returns the graph's outputs; scores have the shape of S."""
        self._body(self.graph.nodes)
        outputs = [self._output(a) for a in self.graph.outputs]
        return self._text(outputs[0] if self.graph.kind != "joint" else f"({', '.join(outputs)})")

    def value(self) -> str:
        """A function that returns the last node as it is."""
        self._body(self.graph.nodes)
        return self._text(f"v{len(self.graph.nodes) - 1}")

    def offset(self) -> str:
        """A function that returns the offset at which the last node, a gather, reads a contiguous
        tensor."""
        *nodes, gather = self.graph.nodes
        self._body(nodes)
        table, *indices = gather.args
        offset = "0"
        for dim, index in enumerate(indices):
            at = self._clamped_index(str(table), dim, index)
            if dim == 0 and self.wide_offsets[int(str(table)[1:])]:
                at = f"tl.cast({at}, tl.int64)"
            offset = at if dim == 0 else f"({offset}) * {table}_size{dim} + {at}"
        return self._text(offset)

    def integer_sum(self, of: tuple[tuple[int, str], ...]) -> str:
        """A function that returns the sum of some integers."""
        self._body(self.graph.nodes)
        return self._text(" + ".join(f"({sign}) * {self._arg(a, 'i64')}" for sign, a in of))

    def affine(self, found: AffineScore, hoisted: Hoisted | None) -> str:
        """A function that returns the terms of an affine score, each a sum:

        - the gain of S;
        - the distances without absolute value, at the pair (q_at, kv_at), and what all pairs share;
        - their slope along the columns, which are keys, or queries unless `QUERIES`;
        - the distance under the absolute value, at that pair; its slope; and its factor;
        - the terms of q_idx, and those of kv_idx.

        A term that is missing is -0.0: compilers know that adding it changes nothing. The hoisted
        values are passed behind the captured ones.
        """
        self._body(self.graph.nodes)
        for k, names in enumerate(hoisted[:3] if hoisted else ()):
            self._take_all(f"captured[{k + 2}]", names)
        plain = [(n, x) for n, x in enumerate(found.distances) if not x.has_abs]
        absolute = [(n, x) for n, x in enumerate(found.distances) if x.has_abs]
        at = "tl.cast(distance{}(0.0, b, h, q_at, kv_at, captured), tl.float32)".format
        slope = "({!r} if QUERIES else {!r})".format
        shared, of_q, of_kv = (
            [f"{self._product(p)} * {self._arg(p.value, 'f32')}" for p in of]
            for of in (found.shared, found.of_q, found.of_kv)
        )
        parts = [
            [self._product(p) for p in found.gain],
            [f"{self._product(x)} * {at(n)}" for n, x in plain] + shared,
            [f"{self._product(x)} * {slope(*map(float, x.slope))}" for _, x in plain],
            [at(n) for n, _ in absolute],
            [slope(*map(float, x.slope)) for _, x in absolute],
            [self._product(x) for _, x in absolute],
            of_q,
            of_kv,
        ]
        result = ", ".join(" + ".join(part or ["(-0.0)"]) for part in parts)
        return self._text(f"({result})", (*POSITIONS, "q_at", "kv_at", "QUERIES: tl.constexpr"))

    def hoisted(self, hoisted: Hoisted, which: str) -> str:
        """A function that returns hoisted values, those of the field `which`: booleans as int32. Of
        every group of comparisons it returns the number that must be <= 0, and its slope along the
        columns, which are keys if `QUERIES` and else queries."""
        self._body(self.graph.nodes)
        self._take_all("shared", hoisted.shared if which != "shared" else ())
        parts, args = [], ["b", "h"]
        if which == "steps":
            args += ["q_idx", "kv_idx", "QUERIES: tl.constexpr"]
            for steps in hoisted.steps:
                numbers, (q, kv) = [self._comparison(step) for step in steps], steps[0].slope
                parts += [reduce("tl.maximum({}, {})".format, numbers)]
                parts += [f"{kv} if QUERIES else {q}"]
        else:
            args += [f"{which[3:]}_idx"] if which != "shared" else []
            for name in getattr(hoisted, which):
                value = self._arg(name, "")
                truth = self.dtypes[name] == "bool"
                parts.append(f"tl.cast({value}, tl.int32)" if truth else value)
        args += ["shared"] if which != "shared" else []
        return self._text(f"({', '.join(parts)}{',' * (len(parts) == 1)})", args)

    def pairs(self, hoisted: Hoisted) -> str:
        """The function of pairs, which takes the hoisted values."""
        self._body(self.graph.nodes)
        self._take_all("shared", hoisted.shared)
        self._take_all("of_q", hoisted.of_q)
        self._take_all("of_kv", hoisted.of_kv)
        for k, steps in enumerate(hoisted.steps):
            for step in steps:
                self._take(step.name, f"steps[{k}]")
        return self._text(self._output(self.graph.outputs[0]), (*POSITIONS, *hoisted._fields))

    def _comparison(self, step: Comparison) -> str:
        a, b = map(self._small_integer, self.graph.nodes[int(step.name[1:])].args[:: step.sign])
        return f"{a} - {b} + 1" if step.more else f"{a} - {b}"

    def _small_integer(self, arg: Arg) -> str:
        """An integer, clamped for the comparison with one below 2^29."""
        text = self._arg(arg, "i64")
        return text if self.ranges.is_small(arg) else f"maths.clamp_small({text})"

    def _take_all(self, where: str, names: tuple[str, ...]) -> None:
        """Read some values from a tuple."""
        for k, name in enumerate(names):
            self._take(name, f"{where}[{k}]{' != 0' if self.dtypes[name] == 'bool' else ''}")

    def _take(self, name: str, value: str) -> None:
        n = int(name[1:])
        self.values[n] = (self.values[n][0], f"v{n} = {value}")

    def _product(self, part: Term | Distance) -> str:
        factors = ["1.0"] if part.sign > 0 else ["-1.0"]
        for a, divided in part.factors:
            factors.append(f"(1 / {self._arg(a, 'f32')})" if divided else self._arg(a, "f32"))
        return " * ".join(factors)

    def _text(self, result: str, args: Sequence[str] = ()) -> str:
        """The whole function: its head, the captured values it uses, its body and its result."""
        lines = self._needed(result)
        args = args or ((["score"] if self.graph.kind != "mask" else []) + list(POSITIONS))
        head = ["@triton.jit", f"def {self.name}({', '.join(args)}, captured):"]
        tensors, numbers = [], []
        for item in self.graph.tensors:
            tensors.append(item.name)
            for dim in range(item.ndim or 0):
                tensors += [f"{item.name}_size{dim}", f"{item.name}_stride{dim}"]
        numbers += [i.name for i in self.graph.inputs if i.name[0] in "nx"]
        used = "\n".join(lines)
        unpack = []
        for which, names in enumerate((tensors, numbers)):
            for at, name in enumerate(names):
                if re.search(rf"\b{name}\b", used):
                    value = f"captured[{which}][{at}]"
                    if name[0] == "n":
                        value = f"tl.cast({value}, {self.ranges.type(name)})"
                    unpack.append(f"{name} = {value}")
        return "\n".join(head + [f"    {line}" for line in unpack + lines]) + "\n"

    def _needed(self, result: str) -> list[str]:
        """The lines of the values that the result depends on, each below the user's line; and the
        result."""
        used, kept = result, []
        for line, value in reversed(self.values):
            if re.search(rf"\b{value.partition(' ')[0]}\b", used):
                kept.append((line, value))
                used += f" {value.partition('= ')[2]}"
        lines, last = [], ""
        for line, value in reversed(kept):
            if line and line != last:
                lines.append(f"# {line}")
                last = line
            lines.append(value)
        return [*lines, f"return {result}"]

    def _body(self, nodes: Sequence[Node]) -> None:
        for n, node in enumerate(nodes):
            self.dtypes[f"%{n}"] = node.dtype
            self.values.append((node.line, f"v{n} = {self._node(n, node)}"))

    def _node(self, n: int, node: Node) -> str:
        if node.op == "gather":
            if n in self.per_diagonal and self.bias_tables:
                given = f"captured[2][{self.per_diagonal.index(n)}]"
                return given if node.dtype == "f32" else f"{given}.to({TYPES[node.dtype]})"
            if n in self.per_diagonal:
                band = f"bias{self.per_diagonal.index(n)}"
                return f"diagonals.expand({band}, {', '.join(POSITIONS)}, captured)"
            return self._gather(node)
        if node.op == "to":
            return self._to(n, node)
        of = self._dtype(node)
        args = [self._arg(a, of) for a in node.args]
        if node.op == "where":
            args[0] = self._arg(node.args[0], "bool")
            condition, *rest = [
                self._typed(x, a, node) for x, a in zip(args, node.args, strict=True)
            ]
            return f"tl.where({', '.join([condition, *rest])})"
        low = of in ("bf16", "f16")
        if low:  # as PyTorch does: computed in float32, rounded to the dtype
            args = [
                f"{a}.to(tl.float32)" if isinstance(x, str) else a
                for a, x in zip(args, node.args, strict=True)
            ]
        text = self._formula(node, of, args)
        if low and node.dtype == of:
            return f"({text}).to({TYPES[of]})"
        if of == "i64" and node.dtype == "i64" and self.ranges.widens(n):
            args[0] = f"tl.cast({args[0]}, tl.int64)"  # the result needs more bits than these have
            text = self._formula(node, of, args)
        return text

    def _formula(self, node: Node, of: str, args: list[str]) -> str:
        op = node.op
        if of == "bool":
            if op in ("not", "invert"):
                return f"~{args[0]}"
            op = {"max": "or", "min": "and", "mul": "and", "add": "or"}.get(op, op)
        if op == "div" and of in ("f32", "bf16", "f16") and self._has_reciprocal(node.args[1]):
            return f"{args[0]} * (1 / {args[1]})"  # one division for all pairs
        if op == "tanh" and self.approx_tanh:
            return f"maths.approx_tanh({args[0]})"
        if op == "pow" and (short := _short_power(args[0], node.args[1], of)):
            return short
        if op in INFIX:
            return f"{args[0]} {INFIX[op]} {args[1]}"
        formulas = FLOAT_FORMULAS if of in FLOATS else INT_FORMULAS
        if op not in formulas:
            raise ModError(f"a score or mask uses {op} on {of}, which kernels cannot compute")
        return formulas[op].format(*args)

    def _has_reciprocal(self, by: Arg) -> bool:
        """Whether all pairs are divided by one number, whose reciprocal is finite."""
        return self.kinds[by] == "one" if isinstance(by, str) else 1e-30 < abs(by) < 1e30

    def _gather(self, node: Node) -> str:
        table, *indices = node.args
        assert isinstance(table, str)
        wide_offsets = self.wide_offsets[int(table[1:])]
        pointer = table
        for dim, index in enumerate(indices):
            at = self._clamped_index(table, dim, index)
            at = f"tl.cast({at}, tl.int64)" if wide_offsets else at
            pointer += f" + {at} * {table}_stride{dim}"
        loaded = f"tl.load({pointer})"
        return f"{loaded} != 0" if node.dtype == "bool" else loaded

    def _clamped_index(self, table: str, dim: int, index: Arg) -> str:
        index = self._arg(index, "i64")
        return f"maths.clamp_index({index}, {table}_size{dim})"

    def _to(self, n: int, node: Node) -> str:
        have = self._dtype(node)
        arg = self._arg(node.args[0], have)
        if node.dtype == "bool":
            return f"{arg} != 0"
        source = node.args[0]
        if node.dtype == "f32" and isinstance(source, str) and self._exact_in_float32(source):
            return self._in_float32(source)
        kind = self.ranges.type(f"%{n}") if node.dtype == "i64" else TYPES[node.dtype]
        return f"tl.cast({arg}, {kind})"

    def _exact_in_float32(self, name: str) -> bool:
        """Whether an integer varies by pair and has the same value computed in float32."""
        varies = self.kinds[name] in ("diagonals", "pairs")
        return varies and as_floats(self.graph, self.ranges, name)

    def _in_float32(self, arg: Arg) -> str:
        """Such an integer, computed from positions converted to float32."""
        if not isinstance(arg, str):
            return repr(float(arg))
        if arg[0] != "%":
            return f"tl.cast({arg}, tl.float32)"
        node = self.graph.nodes[int(arg[1:])]
        args = [self._in_float32(a) for a in node.args]
        return f"({args[0]} {INFIX[node.op]} {args[1]})" if node.op in INFIX else FLOAT_FORMULAS[
            node.op
        ].format(*args)  # fmt: skip

    def _dtype(self, node: Node) -> str:
        """The dtype that an op's operands share; of a `where`, its branches."""
        if node.op == "where":
            return node.dtype
        for a in reversed(node.args):
            if isinstance(a, str) and a in self.dtypes:
                return self.dtypes[a]
        return node.dtype

    def _arg(self, arg: Arg, dtype: str) -> str:
        if isinstance(arg, str):
            return f"v{arg[1:]}" if arg[0] == "%" else arg
        if dtype in FLOATS and not isinstance(arg, bool):
            value = float(arg)
            if value != value or value in (float("inf"), float("-inf")):
                return f'float("{value}")'
            return repr(value) if value >= 0 else f"({value!r})"
        return repr(arg) if arg >= 0 else f"({arg!r})"

    def _typed(self, text: str, arg: Arg, node: Node) -> str:
        """A branch of a `where`, which has the node's type even if both are numbers."""
        if isinstance(arg, str) or node.dtype in ("bool", "f32"):
            return text
        return f"tl.cast({text}, {TYPES[node.dtype]})"

    def _output(self, arg: Arg) -> str:
        # A number takes its shape and layout from a tensor: Gluon creates none without a layout.
        if self.graph.kind == "mask":
            if isinstance(arg, str):
                return self._arg(arg, "bool")
            return f"tl.where(kv_idx == kv_idx, {arg}, {arg})"
        value = self._arg(arg, "f32")
        if isinstance(arg, str) and self.kinds[arg] != "one":
            return f"tl.broadcast_to({value}, score.shape)"
        return f"tl.where(score == score, {value}, {value})"


def _short_power(base: str, exponent: Arg, dtype: str) -> str | None:
    """A small integer power as products."""
    if isinstance(exponent, str) or exponent != int(exponent) or not 0 <= exponent <= 8:
        return f"tl.sqrt({base})" if exponent == 0.5 and dtype in FLOATS else None
    return " * ".join([base] * int(exponent)) if exponent else f"{base} * 0 + 1"


def float_gathers(graph: Graph, kind: str) -> list[int]:
    """The gathers of floats whose indices have this kind of dependence (dependence.py)."""
    return [
        n for n, node in graph.gathers
        if node.dtype in FLOATS and dependence_of(graph, node.args[1:]) == kind
    ]  # fmt: skip


def diagonal_gathers(graph: Graph) -> list[int]:
    """The gathers of floats that read one number per diagonal of a tile."""
    return float_gathers(graph, "diagonals")


def gathers_in_kernel(graph: Graph) -> list[int]:
    """The gathers left to the kernel where those of `diagonal_gathers` come from tables."""
    cut = set(diagonal_gathers(graph))
    seen: set[Arg] = set()
    todo = list(graph.outputs)
    while todo:
        name = todo.pop()
        if not isinstance(name, str) or name[0] != "%" or name in seen or int(name[1:]) in cut:
            continue
        seen.add(name)
        todo += graph.nodes[int(name[1:])].args
    return [n for n, _ in graph.gathers if f"%{n}" in seen]
