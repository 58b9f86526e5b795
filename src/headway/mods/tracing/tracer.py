"""A dispatch mode that records what a function does to symbols.

Symbols are 0-d tensors on the "meta" device. The mode sees every aten op on them, below autograd,
so it also records derivatives. An op that is not a pure pointwise function of symbols and captured
tensors is refused with the user's file, line and op.
"""

import linecache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ModError
from ...surroundings import is_wrapped
from ..graph import COMPARISONS, DTYPE_NAMES, DTYPES, Arg, Builder, Input
from .aten import CREATION, FILLED, IDENTITY, OPS, Arguments, full_name, sample
from .locations import Location, quote, user_location
from .values import as_constant, describe_value, flatten_arguments

aten = torch.ops.aten

_LIFTED = ("lift_fresh", "lift_fresh_copy")  # of torch.tensor(...), whose creation no mode sees


class Tracer(TorchDispatchMode):
    """A recorder of aten ops on symbols (0-d meta tensors) and on the tensors that they meet.

    A tensor that is neither a symbol nor made by the function is captured.

    - `record_detach`: record where `detach` and `torch.no_grad` cut the derivative.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not load its compiler to skip this mode."""
        return False

    def __init__(self, subject: str, record_detach: bool = False) -> None:
        super().__init__()
        self.subject = subject
        self.record_detach = record_detach
        self.location: Location | None = None  # the function's first line
        self.outer: CodeType | None = None  # the code that called the traced function
        self.builder = Builder()
        self.inputs: list[Input] = []
        self.captured: list[Tensor] = []
        self.value_read: str | None = None  # the line where a captured tensor's value was read
        self.shape_read: list[Tensor] = []  # captured tensors whose shape was read
        self.no_grad_used = False  # a value was computed under `torch.no_grad`
        self._args: dict[int, Arg] = {}  # id of a symbol -> its value in the graph
        self._partly_indexed: dict[
            int, tuple[int, tuple]
        ] = {}  # table[h], still to be indexed further
        self._captured_numbers: set[int] = set()  # ids of the symbols of captured 0-d tensors
        self._own_tensors: dict[int, Tensor] = {}  # tensors with data that the function made
        self._keep_alive: list[Tensor] = []  # ids are only valid while the tensors live

    def symbol(self, arg: Arg, dtype: str | torch.dtype) -> Tensor:
        """Return a new 0-d meta tensor that stands for `arg`."""
        dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
        meta = torch.empty((), dtype=dtype, device="meta")
        return self.bind(meta, arg)

    def bind(self, tensor: Tensor, arg: Arg) -> Tensor:
        self._args[id(tensor)] = arg
        self._keep_alive.append(tensor)
        return tensor

    def add_input(self, name: str, dtype: str) -> Tensor:
        self.inputs.append(Input(name, dtype))
        return self.symbol(name, dtype)

    def is_symbol(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (
            id(value) in self._args or id(value) in self._partly_indexed
        )

    # -- captured tensors ---------------------------------------------------------------------

    def is_captured(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and not self.is_symbol(value)
            and id(value) not in self._own_tensors
        )

    def note_own(self, result: Any) -> Any:
        """Note the result of an op on tensors of the function's own, and return it."""
        for t in result if isinstance(result, list | tuple) else (result,):
            if isinstance(t, Tensor):
                self._own_tensors[id(t)] = t
        return result

    def note_value_read(self) -> None:
        """Note that Python read a number of a captured tensor, which may change between calls."""
        if self.value_read is None:
            location = (self.outer and user_location(self.outer)) or self.location
            self.value_read = f"reads the value of a captured tensor{quote(location)}"

    def capture(self, tensor: Tensor) -> int:
        """Return the number of a captured tensor, the same for the same tensor."""
        for n, captured in enumerate(self.captured):
            if captured is tensor:
                return n
        if not self.is_captured(tensor):
            self.refuse(
                f"indexes a tensor of shape {tuple(tensor.shape)} that it makes itself",
                "make the tensor outside the function and capture it",
            )
        if tensor.dtype not in DTYPE_NAMES:
            self.refuse(
                f"captures a tensor of dtype {tensor.dtype}", "use a float, int or bool tensor"
            )
        self.captured.append(tensor)
        return len(self.captured) - 1

    def call(self, func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch's.

        A captured 0-d tensor that a transform wrapped, or that may have a tangent, is replaced by a
        symbol: no transform is active while we trace, so the dispatcher would unwrap it.
        """
        # By id. Asking whether a tensor has a tangent would be an op of its own.
        symbols = {
            id(arg): self.symbol_of_number(arg)
            for arg in flatten_arguments(args, kwargs)
            if self.is_captured(arg)
            and (is_wrapped(arg) or forward_ad._current_level >= 0)
            and arg.dim() == 0
        }
        if not symbols:
            return func(*args, **kwargs)

        def symbolic(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(symbolic, value))
            return symbols.get(id(value), value)

        result = func(
            *map(symbolic, args), **{name: symbolic(value) for name, value in kwargs.items()}
        )
        if any(isinstance(arg, Tensor) for arg in flatten_arguments((result,), {})):
            return result
        return func(*args, **kwargs)  # a property of the tensor, or its value

    def symbol_of_number(self, tensor: Tensor) -> Tensor:
        """Return the symbol of a captured 0-d tensor."""
        symbol = self._emit("gather", (f"t{self.capture(tensor)}",), tensor.dtype)
        self._captured_numbers.add(id(symbol))
        return symbol

    def gather(self, table: Tensor, index: Any) -> Tensor:
        """Return `table[index]`, with numbers or symbols as indices.

        A row, such as `table[h]`, is a meta tensor that waits for the rest of its indices.
        """
        items = index if isinstance(index, tuple) else (index,)
        number, earlier_indices = self._partly_indexed.get(id(table), (None, ()))
        if number is None:
            number = self.capture(table)
        source = self.captured[number]
        indices = list(earlier_indices)
        for item in items:
            if isinstance(item, bool) or not (isinstance(item, int) or self.is_symbol(item)):
                self.refuse(
                    f"indexes a captured tensor with {describe_value(item)}",
                    "index every dimension with a number or an expression of positions",
                )
            if isinstance(item, Tensor):
                if (
                    id(item) in self._partly_indexed
                    or item.dtype.is_floating_point
                    or item.dtype == torch.bool
                ):
                    self.refuse(
                        f"indexes a captured tensor with a {item.dtype} value",
                        "indices must be integers: convert with .long()",
                    )
                arg = self._args[id(item)]
                if item.dtype != torch.int64:
                    arg = self.builder.emit("to", (arg,), "i64", self._line())
                indices.append(arg)
            else:
                indices.append(item)
        if len(indices) > source.dim():
            self.refuse(
                f"indexes a {source.dim()}-d tensor of shape {tuple(source.shape)} with "
                f"{len(indices)} indices",
                "use one index per dimension",
            )
        if len(indices) < source.dim():
            meta = torch.empty(source.shape[len(indices) :], dtype=source.dtype, device="meta")
            self._partly_indexed[id(meta)] = (number, tuple(indices))
            self._keep_alive.append(meta)
            return meta
        return self._emit("gather", (f"t{number}", *indices), source.dtype)

    # -- ops ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "item", "equal"):
            if any(self.is_symbol(a) and id(a) not in self._captured_numbers for a in args):
                self.refuse_decision()
            if any(self.is_symbol(a) for a in args):
                return func(*map(sample, args), **kwargs)  # `call` reads the tensor itself
            if any(map(self.is_captured, args)):
                self.note_value_read()
            return func(*args, **kwargs)
        flat = [a for a in flatten_arguments(args, kwargs) if isinstance(a, Tensor)]
        if name in _LIFTED and not self.is_symbol(args[0]):
            self.note_own(args[0])
        if not any(self.is_symbol(t) for t in flat):
            if not any(map(self.is_captured, flat)):
                if kwargs.get("device") == torch.device("meta") and name != "empty":
                    return self._record(func, name, args, kwargs)  # autograd's own constants
                if torch.Tag.nondeterministic_seeded in func.tags:
                    self._refuse_random(func)
                return self.note_own(func(*args, **kwargs))  # a constant made inside the function
            if not all(t.dim() == 0 for t in flat):
                self.refuse(
                    f"computes {name} on a whole captured tensor",
                    "do it once, outside the function, and capture the result",
                )
            # `log_scale.exp()`: arithmetic on a 0-d tensor joins the graph, for its gradient.
        return self._record(func, name, args, kwargs)

    def arg(self, value: Any) -> Arg:
        """Return an operand as an argument in the graph: a name or a number."""
        if not isinstance(value, Tensor):
            if isinstance(value, bool | int | float):
                return value
            self.refuse(f"uses {describe_value(value)} as a number", "use numbers and tensors")
        if id(value) in self._args:
            return self._args[id(value)]
        if id(value) in self._partly_indexed or value.dim():
            self.refuse(
                f"uses a tensor of shape {tuple(value.shape)} as one number",
                "index it down to one number per pair, such as table[h, q_idx - kv_idx]",
            )
        if value.device.type == "meta":
            self.refuse("uses a tensor without data", "capture real tensors")
        if not self.is_captured(value):
            return value.item()  # a constant made inside the function
        return self._args[id(self.symbol_of_number(value))]

    def _record(self, func, name, args, kwargs):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse_random(func)
        if any(a.is_out and a.kwarg_only for a in func._schema.arguments):
            self.refuse(f"calls {full_name(func)} with out=", "use what the op returns")
        inplace = name.endswith("_") and not name.endswith("__")
        result = self._translate(func, name[:-1] if inplace else name, args, kwargs)
        if inplace:
            target = args[0]
            arg = self._args[id(result)]
            if result.dtype != target.dtype:
                arg = self.builder.emit("to", (arg,), DTYPE_NAMES[target.dtype], self._line())
            if not self.is_symbol(target) or id(target) in self._captured_numbers:
                self.refuse("changes a captured tensor in place", "a score or mask only computes")
            if self.record_detach and not torch.is_grad_enabled() and target.is_floating_point():
                self.refuse(
                    "changes a value in place under torch.no_grad()",
                    "write x = x + y there, or leave torch.no_grad() out",
                )
            return self.bind(target, arg)
        return result

    def _translate(self, func, name, args, kwargs) -> Tensor:
        """Emit the nodes of an op of PyTorch; `name` is without the underscore of in-place ops."""
        arguments = Arguments(func, args, kwargs)
        if func.namespace != "aten":
            return self._decompose(func, args, kwargs)
        if name in IDENTITY or name == "detach":
            value = arguments.take("self")
            arguments.take_shape()
            if id(value) in self._partly_indexed:
                self.refuse(f"calls {name} on a row of a captured tensor", "index it to one number")
            arg = self.arg(value)
            self._result_dtype(func, args, kwargs, arguments)
            return self.symbol(self._detach_if_cut(arg, value.dtype, name == "detach"), value.dtype)
        if name == "_to_copy":
            value, dtype = arguments.take("self"), arguments.take("dtype")
            self._refuse_unused(func, arguments)
            return self._emit("to", (self.arg(value),), dtype or value.dtype)
        if name in CREATION or name in FILLED or name == "scalar_tensor":
            value = CREATION.get(name)
            if value is None:
                value = arguments.take("s" if name == "scalar_tensor" else "fill_value")
            for operand in ("self", "dtype"):
                arguments.take(operand)
            arguments.take_shape()
            dtype = self._result_dtype(func, args, kwargs, arguments)
            return self.symbol(as_constant(value, dtype), dtype)
        if name == "copy":  # (self, src): src with the dtype of self
            target, value = arguments.take("self"), arguments.take("src")
            self._refuse_unused(func, arguments)
            return self._emit("to", (self.arg(value),), target.dtype)
        if name == "where" and arguments.has(("condition", "self", "other")):
            values = tuple(arguments.take(name) for name in ("condition", "self", "other"))
            dtype = self._result_dtype(func, args, kwargs, arguments)
            return self._emit("where", tuple(map(self.arg, values)), dtype)
        return self._translate_arithmetic(func, name, args, kwargs, arguments)

    def _translate_arithmetic(self, func, name, args, kwargs, arguments: Arguments) -> Tensor:
        """Emit the nodes of an op that computes; decompose one that a graph does not have."""
        if name == "relu":
            value = arguments.take("self")
            dtype = self._result_dtype(func, args, kwargs, arguments)
            if not (self.record_detach and dtype.is_floating_point):
                return self._binary("max", value, 0, dtype)
            clipped = self._record_op(aten.le.Scalar, value, 0)  # at 0 the derivative is 0
            return self._emit("where", (self.arg(clipped), 0.0, self.arg(value)), dtype)
        if name == "square":
            value = arguments.take("self")
            return self._binary(
                "mul", value, value, self._result_dtype(func, args, kwargs, arguments)
            )
        if name in ("clamp", "clamp_min", "clamp_max"):
            value, low, high = map(arguments.take, ("self", "min", "max"))
            dtype = self._result_dtype(func, args, kwargs, arguments)
            return self._clamp(value, low, high, dtype)
        if name in ("add", "sub", "rsub") and arguments.has(("self", "other")):
            a, b, alpha = map(arguments.take, ("self", "other", "alpha"))
            dtype = self._result_dtype(func, args, kwargs, arguments)
            if name == "rsub":  # other - alpha * self
                a, b, name = b, a, "sub"
            if alpha != 1:
                is_tensor = isinstance(b, Tensor)  # its product with alpha has the result's dtype
                b = self._binary("mul", b, alpha, dtype) if is_tensor else b * alpha
            return self._binary(name, a, b, dtype)
        if name == "div":
            a, b, mode = map(arguments.take, ("self", "other", "rounding_mode"))
            division = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}[mode]
            return self._binary(division, a, b, self._result_dtype(func, args, kwargs, arguments))
        if name == "round" and "decimals" in arguments.pending:
            value, decimals = arguments.take("self"), arguments.take("decimals")
            self._result_dtype(func, args, kwargs, arguments)
            scale = 10.0 ** abs(decimals)
            scale_op, unscale_op = (aten.mul, aten.div) if decimals > 0 else (aten.div, aten.mul)
            scaled = self._record_op(scale_op.Tensor, value, scale)
            rounded = self._record_op(aten.round.default, scaled)
            return self._record_op(unscale_op.Tensor, rounded, scale)
        if name.startswith("logical_") and name != "logical_not":
            a, b = map(arguments.take, ("self", "other"))
            self._result_dtype(func, args, kwargs, arguments)
            a, b = (
                self._record_op(aten.ne.Scalar, x, 0) if x.dtype != torch.bool else x
                for x in (a, b)
            )
            return self._binary(name.removeprefix("logical_"), a, b, torch.bool)
        op, operands = OPS.get(name, ("", ()))
        if not operands or not arguments.has(operands):
            return self._decompose(func, args, kwargs)
        values = [arguments.take(operand) for operand in operands]
        dtype = self._result_dtype(func, args, kwargs, arguments)
        if op == "invert" and values[0].dtype == torch.bool:
            op = "not"
        if len(values) == 1:
            return self._unary(op, values[0], dtype)
        return self._binary(op, values[0], values[1], dtype)

    def _refuse_unused(self, func, arguments: Arguments) -> None:
        """Refuse a call with an argument that was not taken into account."""
        unused = arguments.unused()
        if unused is not None:
            name, value = unused
            value = describe_value(value) if isinstance(value, Tensor) else repr(value)
            self.refuse(
                f"calls {full_name(func)} with {name}={value}",
                "leave the argument out, or write what it does with arithmetic and torch.where",
            )

    def _result_dtype(self, func, args, kwargs, arguments: Arguments) -> torch.dtype:
        """Return the dtype of a call's result; refuse unused arguments and more than one number."""
        self._refuse_unused(func, arguments)
        result = func(*map(sample, args), **{n: sample(value) for n, value in kwargs.items()})
        if result.numel() != 1:
            self.refuse(
                f"makes {tuple(result.shape)} numbers of one with {full_name(func)}",
                "compute one number per pair",
            )
        return result.dtype

    def _clamp(self, value: Any, low: Any, high: Any, dtype: torch.dtype) -> Tensor:
        """Clamp a value; at a bound its derivative is 1, where that of `maximum` is one half."""
        for op, test, limit in (("max", aten.ge, low), ("min", aten.le, high)):
            if limit is None:
                continue
            bounded = self._binary(op, value, limit, dtype)
            if self.record_detach and dtype.is_floating_point:
                inside = self._record_op(
                    test.Tensor if isinstance(limit, Tensor) else test.Scalar, value, limit
                )
                args = self.arg(inside), self._cast(value, dtype), self.arg(bounded)
                bounded = self._emit("where", args, dtype)
            value = bounded
        return value

    def _decompose(self, func, args, kwargs):
        from torch._decomp import decomposition_table

        if func in decomposition_table:
            with self:
                return decomposition_table[func](*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        self.refuse(
            f"calls {full_name(func)}",
            "use pointwise arithmetic, comparisons, torch.where and indexing of captured tensors",
        )

    def _record_op(self, func, *args) -> Tensor:
        return self._record(func, func.overloadpacket.__name__, args, {})

    def _cast(self, value: Any, dtype: torch.dtype) -> Arg:
        arg = self.arg(value)
        if isinstance(value, Tensor) and value.dtype != dtype:
            return self.builder.emit("to", (arg,), DTYPE_NAMES[dtype], self._line())
        if not isinstance(arg, str) and dtype.is_floating_point:
            return float(arg)
        return arg

    def _unary(self, op: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        operand = value.dtype if dtype == torch.bool else dtype
        return self._emit(op, (self._cast(value, operand),), dtype)

    def _binary(self, op: str, a: Any, b: Any, dtype: torch.dtype) -> Tensor:
        common = dtype
        if op in COMPARISONS:
            common = torch.result_type(*map(sample, (a, b)))
        return self._emit(op, (self._cast(a, common), self._cast(b, common)), dtype)

    def _emit(self, op: str, args: tuple[Arg, ...], dtype: torch.dtype) -> Tensor:
        if dtype not in DTYPE_NAMES:
            self.refuse(f"makes a value of dtype {dtype}", "use float, int and bool values")
        if op == "to" and isinstance(args[0], str):
            source = self.builder.dtype(args[0])
            source = source or next((i.dtype for i in self.inputs if i.name == args[0]), None)
            if source == DTYPE_NAMES[dtype]:
                return self.symbol(args[0], dtype)
        arg = self.builder.emit(op, args, DTYPE_NAMES[dtype], self._line())
        return self.symbol(self._detach_if_cut(arg, dtype), dtype)

    def _detach_if_cut(self, arg: Arg, dtype: torch.dtype, detached: bool = False) -> Arg:
        """Return a value, behind a `detach` node if it was detached or made under `no_grad`."""
        if not (detached or not torch.is_grad_enabled()):
            return arg
        if not self.record_detach or not isinstance(arg, str) or not dtype.is_floating_point:
            return arg
        self.no_grad_used |= not detached
        return self.builder.emit("detach", (arg,), DTYPE_NAMES[dtype], self._line())

    # -- messages -----------------------------------------------------------------------------

    def _line(self) -> str:
        """Return the user's source line as text, which stays when the function moves."""
        location = user_location(self.outer) if self.outer else None
        return linecache.getline(*location).strip() if location else ""

    def refuse_decision(self) -> None:
        self.refuse(
            "makes a Python decision on the value of a symbol (if, while, and, or, not, int(), "
            "float(), .item())",
            "use torch.where(condition, a, b), and & | ~ in place of and, or, not",
        )

    def _refuse_random(self, func) -> None:
        self.refuse(
            f"calls {full_name(func)}, which would be drawn once and kept",
            "draw outside the function and capture the tensor",
        )

    def refuse(self, problem: str, remedy: str):
        location = (self.outer and user_location(self.outer)) or self.location
        raise ModError(f"the {self.subject} {problem}; {remedy}{quote(location)}")
