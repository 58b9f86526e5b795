"""Lowering: a graph becomes one Triton function, a statement per node, below the user's lines.

Node n is lowered to a statement `v{n} = ...`. Statements that the result does not depend on are
left out, and so are captured values that no statement reads.
"""

import re
from collections.abc import Sequence
from functools import reduce

from ....errors import ModError
from ....mods.graph import FLOATS, POSITIONS, Arg, Graph, Node
from ....mods.ops import OPS, UNROLLED_IN_KERNELS
from .affine import AffineScore, Distance, Term
from .dependence import dependences, diagonal_gathers, has_reciprocal
from .hoist import Comparison, HoistedNames
from .int_ranges import IntRanges, as_floats
from .spec import CodegenSpec

TYPES = {
    "f64": "tl.float64", "f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16",
    "i64": "tl.int64", "i32": "tl.int32", "i16": "tl.int16", "i8": "tl.int8", "u8": "tl.uint8",
    "bool": "tl.int1",
}  # fmt: skip


# Functions of T, and of the number that a score observes: its value, derivative and tangent.
OF_T = "score", "derivative", "score_tangent"
OF_NUMBER = "number", "number_derivative", "number_tangent"


class FunctionEmitter:
    """The emitter of one function that evaluates a graph.

    - `name`: the function's name.
    - `wide_offsets`: for every captured tensor, whether an offset into it may need 64 bits.
    """

    def __init__(
        self, name: str, graph: Graph, codegen_spec: CodegenSpec, wide_offsets: tuple[bool, ...]
    ) -> None:
        self.name, self.graph, self.wide_offsets = name, graph, wide_offsets
        self.approx_tanh, self.bias_tables = codegen_spec.approx_tanh, codegen_spec.bias_tables
        # These functions are called with a tile of pairs; others may get single positions.
        takes_tile = codegen_spec.per_diagonal and name in (*OF_T, *OF_NUMBER)
        self.per_diagonal = diagonal_gathers(graph) if takes_tile else []
        self.ranges = IntRanges(graph, codegen_spec.narrow)
        self.dependences = dependences(graph)
        self.dtypes = {i.name: i.dtype for i in graph.inputs if i.ndim is None}
        self.statements: list[tuple[str, str]] = []  # per node: the user's line, the statement

    def emit_outputs(self, *tangents: str, only: Sequence[Arg] | None = None) -> str:
        """Emit a function that returns the graph's outputs, or `only` some. Scores have the shape
        of S. `tangents` are inputs beside S, of its shape."""
        self._lower_nodes(self.graph.nodes)
        outputs = [self._output(a) for a in (self.graph.outputs if only is None else only)]
        parameters = ("score", *tangents, *POSITIONS) if tangents else ()
        result = f"({', '.join(outputs)})" if len(outputs) > 1 else outputs[0]
        return self._function_source(result, parameters)

    def emit_last_node(self) -> str:
        """Emit a function that returns the last node's value."""
        self._lower_nodes(self.graph.nodes)
        return self._function_source(f"v{len(self.graph.nodes) - 1}")

    def emit_offset(self) -> str:
        """Emit a function that returns the offset at which the last node, a gather, reads a
        contiguous tensor."""
        *nodes, gather = self.graph.nodes
        self._lower_nodes(nodes)
        table, *indices = gather.args
        offset = "0"
        for dim, index in enumerate(indices):
            clamped = self._clamped_index(str(table), dim, index)
            if dim == 0 and self.wide_offsets[int(str(table)[1:])]:
                clamped = f"tl.cast({clamped}, tl.int64)"
            offset = clamped if dim == 0 else f"({offset}) * {table}_size{dim} + {clamped}"
        return self._function_source(offset)

    def emit_integer_sum(self, integers: tuple[tuple[int, str], ...]) -> str:
        """Emit a function that returns the sum of some integers, each with its sign."""
        self._lower_nodes(self.graph.nodes)
        addends = (f"({sign}) * {self._operand(name, 'i64')}" for sign, name in integers)
        return self._function_source(" + ".join(addends))

    def emit_affine(self, score: AffineScore, hoisted: HoistedNames | None) -> str:
        """Emit a function that returns the terms of an affine score, each a sum:

        - the gain of S;
        - the distances without absolute value, at the pair (q_at, kv_at), and the shared terms;
        - their slope along the columns, which are keys, or queries unless `QUERIES`;
        - the distance under the absolute value, at that pair; its slope; and its factor;
        - the terms of q_idx, and those of kv_idx.

        A missing term is -0.0: compilers know that adding it changes nothing. The hoisted values
        are passed after the captured ones.
        """
        self._lower_nodes(self.graph.nodes)
        for k, names in enumerate(hoisted[:3] if hoisted else ()):
            self._bind_all(f"captured[{k + 2}]", names)
        signed = [(n, d) for n, d in enumerate(score.distances) if not d.has_abs]
        absolute = [(n, d) for n, d in enumerate(score.distances) if d.has_abs]
        distance = "tl.cast(distance{}(0.0, b, h, q_at, kv_at, captured), tl.float32)".format
        slope = "({!r} if QUERIES else {!r})".format
        shared, of_q, of_kv = (
            [f"{self._factor_product(term)} * {self._operand(term.value, 'f32')}" for term in terms]
            for terms in (score.shared, score.of_q, score.of_kv)
        )
        sums = [
            [self._factor_product(term) for term in score.gain],
            [f"{self._factor_product(d)} * {distance(n)}" for n, d in signed] + shared,
            [f"{self._factor_product(d)} * {slope(*map(float, d.slope))}" for _, d in signed],
            [distance(n) for n, _ in absolute],
            [slope(*map(float, d.slope)) for _, d in absolute],
            [self._factor_product(d) for _, d in absolute],
            of_q,
            of_kv,
        ]
        result = ", ".join(" + ".join(addends or ["(-0.0)"]) for addends in sums)
        parameters = *POSITIONS, "q_at", "kv_at", "QUERIES: tl.constexpr"
        return self._function_source(f"({result})", parameters)

    def emit_hoisted(self, hoisted: HoistedNames, field: str) -> str:
        """Emit a function that returns the hoisted values of a field, booleans as int32.

        Of every group of comparisons it returns the number that must be <= 0, and its slope along
        the columns, which are keys if `QUERIES` and else queries.
        """
        self._lower_nodes(self.graph.nodes)
        self._bind_all("shared", hoisted.shared if field != "shared" else ())
        results, parameters = [], ["b", "h"]
        if field == "steps":
            parameters += ["q_idx", "kv_idx", "QUERIES: tl.constexpr"]
            for comparisons in hoisted.steps:
                numbers, (q, kv) = map(self._comparison, comparisons), comparisons[0].slope
                results += [reduce("tl.maximum({}, {})".format, numbers)]
                results += [f"{kv} if QUERIES else {q}"]
        else:
            parameters += [f"{field[3:]}_idx"] if field != "shared" else []
            for name in getattr(hoisted, field):
                operand = self._operand(name, "")
                is_bool = self.dtypes[name] == "bool"
                results.append(f"tl.cast({operand}, tl.int32)" if is_bool else operand)
        parameters += ["shared"] if field != "shared" else []
        comma = "," if len(results) == 1 else ""
        return self._function_source(f"({', '.join(results)}{comma})", parameters)

    def emit_pairs(self, hoisted: HoistedNames) -> str:
        """Emit the function of pairs, which takes the hoisted values."""
        self._lower_nodes(self.graph.nodes)
        self._bind_all("shared", hoisted.shared)
        self._bind_all("of_q", hoisted.of_q)
        self._bind_all("of_kv", hoisted.of_kv)
        for k, comparisons in enumerate(hoisted.steps):
            for comparison in comparisons:
                self._bind(comparison.name, f"steps[{k}]")
        parameters = *POSITIONS, *hoisted._fields
        return self._function_source(self._output(self.graph.outputs[0]), parameters)

    def _comparison(self, comparison: Comparison) -> str:
        node = self.graph.nodes[int(comparison.name[1:])]
        a, b = map(self._small_integer, node.args[:: comparison.sign])
        return f"{a} - {b} + 1" if comparison.more else f"{a} - {b}"

    def _small_integer(self, arg: Arg) -> str:
        """Return an integer operand, clamped if it may be larger than the 2^29 that it is compared
        with."""
        operand = self._operand(arg, "i64")
        return operand if self.ranges.is_small(arg) else f"maths.clamp_small({operand})"

    def _bind_all(self, source: str, names: tuple[str, ...]) -> None:
        """Replace the statements of some values by reads from the tuple `source`."""
        for k, name in enumerate(names):
            self._bind(name, f"{source}[{k}]{' != 0' if self.dtypes[name] == 'bool' else ''}")

    def _bind(self, name: str, expression: str) -> None:
        """Replace the statement of a value."""
        n = int(name[1:])
        line, _ = self.statements[n]
        self.statements[n] = line, f"v{n} = {expression}"

    def _factor_product(self, term: Term | Distance) -> str:
        """Return the product of a term's sign and factors."""
        factors = ["1.0"] if term.sign > 0 else ["-1.0"]
        for number, divides in term.factors:
            operand = self._operand(number, "f32")
            factors.append(f"(1 / {operand})" if divides else operand)
        return " * ".join(factors)

    def _function_source(self, result: str, parameters: Sequence[str] = ()) -> str:
        """Return the function: its head, the captured values that it reads, its body, `result`."""
        body = self._live_lines(result)
        if not parameters:
            parameters = [*(["score"] if self.graph.kind != "mask" else []), *POSITIONS]
        head = ["@triton.jit", f"def {self.name}({', '.join(parameters)}, captured):"]
        tensors = []
        for item in self.graph.tensors:
            tensors.append(item.name)
            for dim in range(item.ndim or 0):
                tensors += [f"{item.name}_size{dim}", f"{item.name}_stride{dim}"]
        numbers = [i.name for i in self.graph.inputs if i.name[0] in "nx"]
        body_text = "\n".join(body)
        reads = []
        for k, names in enumerate((tensors, numbers)):
            for index, name in enumerate(names):
                if re.search(rf"\b{name}\b", body_text):
                    value = f"captured[{k}][{index}]"
                    if name[0] == "n":
                        value = f"tl.cast({value}, {self.ranges.type(name)})"
                    reads.append(f"{name} = {value}")
        return "\n".join(head + [f"    {line}" for line in reads + body]) + "\n"

    def _live_lines(self, result: str) -> list[str]:
        """Return the statements that the result depends on, each below the user's line, and the
        return statement."""
        uses, live_statements = result, []
        for line, statement in reversed(self.statements):
            if re.search(rf"\b{statement.partition(' ')[0]}\b", uses):
                live_statements.append((line, statement))
                uses += f" {statement.partition('= ')[2]}"
        lines, last_line = [], ""
        for line, statement in reversed(live_statements):
            if line and line != last_line:
                lines.append(f"# {line}")
                last_line = line
            lines.append(statement)
        return [*lines, f"return {result}"]

    def _lower_nodes(self, nodes: Sequence[Node]) -> None:
        for n, node in enumerate(nodes):
            self.dtypes[f"%{n}"] = node.dtype
            self.statements.append((node.line, f"v{n} = {self._lower_node(n, node)}"))

    def _lower_node(self, n: int, node: Node) -> str:
        """Return the expression of a node."""
        if node.op == "gather":
            return self._lower_gather(n, node)
        if node.op == "to":
            return self._lower_cast(n, node)
        operand_dtype = self._operand_dtype(node)
        operands = [self._operand(a, operand_dtype) for a in node.args]
        if node.op == "where":
            operands[0] = self._operand(node.args[0], "bool")
            typed = [self._typed(o, a, node) for o, a in zip(operands, node.args, strict=True)]
            return f"tl.where({', '.join(typed)})"
        half_precision = operand_dtype in ("bf16", "f16")
        if half_precision:  # as PyTorch does: computed in float32, rounded to the dtype
            operands = [
                f"{operand}.to(tl.float32)" if isinstance(arg, str) else operand
                for operand, arg in zip(operands, node.args, strict=True)
            ]
        expression = self._lower_op(node, operand_dtype, operands)
        if half_precision and node.dtype == operand_dtype:
            return f"({expression}).to({TYPES[operand_dtype]})"
        if operand_dtype == "i64" and node.dtype == "i64" and self.ranges.widens(n):
            # The result needs more bits than the operands have.
            operands[0] = f"tl.cast({operands[0]}, tl.int64)"
            expression = self._lower_op(node, operand_dtype, operands)
        return expression

    def _lower_op(self, node: Node, dtype: str, operands: list[str]) -> str:
        """Return the expression of an op on operands of a dtype."""
        op = node.op
        if dtype == "bool":
            if op in ("not", "invert"):
                return f"~{operands[0]}"
            op = {"max": "or", "min": "and", "mul": "and", "add": "or"}.get(op, op)
        divides = op == "div" and dtype in ("f32", "bf16", "f16")
        if divides and has_reciprocal(node.args[1], self.dependences):
            return f"{operands[0]} * (1 / {operands[1]})"  # one division for all pairs
        if op == "tanh" and self.approx_tanh:
            return f"maths.approx_tanh({operands[0]})"
        if op == "pow" and (product := _power_as_product(operands[0], node.args[1], dtype)):
            return product
        text = OPS[op].floats if dtype in FLOATS else OPS[op].ints
        if text is None:
            raise ModError(_refusal(node, dtype))
        return text.format(*operands)

    def _lower_gather(self, n: int, node: Node) -> str:
        """Return a load of a captured tensor, or the value that the kernel read by diagonals."""
        if n in self.per_diagonal and self.bias_tables:
            bias = f"captured[2][{self.per_diagonal.index(n)}]"
            return bias if node.dtype == "f32" else f"{bias}.to({TYPES[node.dtype]})"
        if n in self.per_diagonal:
            bias = f"bias{self.per_diagonal.index(n)}"
            return f"diagonals.expand({bias}, {', '.join(POSITIONS)}, captured)"
        table, *indices = node.args
        assert isinstance(table, str)
        wide_offsets = self.wide_offsets[int(table[1:])]
        pointer = table
        for dim, index in enumerate(indices):
            clamped = self._clamped_index(table, dim, index)
            clamped = f"tl.cast({clamped}, tl.int64)" if wide_offsets else clamped
            pointer += f" + {clamped} * {table}_stride{dim}"
        loaded = f"tl.load({pointer})"
        return f"{loaded} != 0" if node.dtype == "bool" else loaded

    def _clamped_index(self, table: str, dim: int, index: Arg) -> str:
        return f"maths.clamp_index({self._operand(index, 'i64')}, {table}_size{dim})"

    def _lower_cast(self, n: int, node: Node) -> str:
        arg = node.args[0]
        operand = self._operand(arg, self._operand_dtype(node))
        if node.dtype == "bool":
            return f"{operand} != 0"
        if node.dtype == "f32" and isinstance(arg, str) and self._exact_in_float32(arg):
            return self._float32_operand(arg)
        target = self.ranges.type(f"%{n}") if node.dtype == "i64" else TYPES[node.dtype]
        return f"tl.cast({operand}, {target})"

    def _exact_in_float32(self, name: str) -> bool:
        """Check that an integer varies by pair and has the same value computed in float32."""
        varies = self.dependences[name] in ("diagonals", "pairs")
        return varies and as_floats(self.graph, self.ranges, name)

    def _float32_operand(self, arg: Arg) -> str:
        """Return such an integer, computed from positions converted to float32."""
        if not isinstance(arg, str):
            return repr(float(arg))
        if arg[0] != "%":
            return f"tl.cast({arg}, tl.float32)"
        node = self.graph.nodes[int(arg[1:])]
        operands = [self._float32_operand(a) for a in node.args]
        text = str(OPS[node.op].floats).format(*operands)
        return f"({text})" if node.op in ("add", "sub", "mul") else text

    def _operand_dtype(self, node: Node) -> str:
        """Return the dtype that an op's operands share; of a `where`, its branches."""
        if node.op == "where":
            return node.dtype
        for a in reversed(node.args):
            if isinstance(a, str) and a in self.dtypes:
                return self.dtypes[a]
        return node.dtype

    def _operand(self, arg: Arg, dtype: str) -> str:
        """Return a value's name, or a number as a literal of a dtype."""
        if isinstance(arg, str):
            return f"v{arg[1:]}" if arg[0] == "%" else arg
        if dtype in FLOATS and not isinstance(arg, bool):
            value = float(arg)
            if value != value or value in (float("inf"), float("-inf")):
                return f'float("{value}")'
            return repr(value) if value >= 0 else f"({value!r})"
        return repr(arg) if arg >= 0 else f"({arg!r})"

    def _typed(self, operand: str, arg: Arg, node: Node) -> str:
        """Return an operand of a `where`, which has the node's type even if both branches are
        numbers."""
        if isinstance(arg, str) or node.dtype in ("bool", "f32"):
            return operand
        return f"tl.cast({operand}, {TYPES[node.dtype]})"

    def _output(self, arg: Arg) -> str:
        # A number takes its shape and layout from a tensor: Gluon creates none without a layout.
        if self.graph.kind == "mask":
            if isinstance(arg, str):
                return self._operand(arg, "bool")
            return f"tl.where(kv_idx == kv_idx, {arg}, {arg})"
        operand = self._operand(arg, "f32")
        if isinstance(arg, str) and self.dependences[arg] != "one":
            return f"tl.broadcast_to({operand}, score.shape)"
        return f"tl.where(score == score, {operand}, {operand})"


def _power_as_product(base: str, exponent: Arg, dtype: str) -> str | None:
    """Return a small integer power as a product; None for other exponents."""
    if isinstance(exponent, str) or exponent != int(exponent) or not 0 <= exponent <= 8:
        return f"tl.sqrt({base})" if exponent == 0.5 and dtype in FLOATS else None
    return " * ".join([base] * int(exponent)) if exponent else f"{base} * 0 + 1"


def _refusal(node: Node, dtype: str) -> str:
    """Return the message for an op that kernels do not have."""
    place = f"\n    {node.line}" if node.line else ""
    if node.op == "unrolled":
        return (
            f"a score or mask reduces {node.args[1]} numbers per pair; GPU kernels unroll at most "
            f"{UNROLLED_IN_KERNELS}; reduce them once, outside the function, and capture the "
            f'result, or pass backend="cpu" or "reference"{place}'
        )
    return (
        f"a score or mask computes {node.op} of {dtype}, which GPU kernels do not have; convert "
        f"the number with .float(), compute it outside the function and capture the result, or "
        f'pass backend="reference"{place}'
    )
