"""A recorder of what a function of symbols does.

Symbols are 0-d tensors on the "meta" device. The recorder is a dispatch mode: it sees every aten op
that reaches them, below autograd, so it also writes down a derivative. Whatever is not a pure
pointwise function of symbols and captured tensors is refused with the user's file, line and op.
"""

import linecache
import math
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
from .locations import Place, quote, user_place

aten = torch.ops.aten

_LIFTED = ("lift_fresh", "lift_fresh_copy")  # torch.tensor(...), made where no mode sees it


class Tracer(TorchDispatchMode):
    """Records aten ops on symbols (0-d meta tensors) and on the tensors they meet: a tensor that
    is neither a symbol nor made by the function is one that it captures.

    - `cuts`: what `detach` and `torch.no_grad` take out of the derivative is written down.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch need not load its compiler to keep it out of this mode."""
        return False

    def __init__(self, what: str, cuts: bool = False) -> None:
        super().__init__()
        self.what = what
        self.cuts = cuts
        self.place: Place | None = None  # of the function itself
        self.outer: CodeType | None = None  # who called the function that is running
        self.builder = Builder()
        self.inputs: list[Input] = []
        self.captured: list[Tensor] = []
        self.value_read: str | None = None  # the place where a captured tensor's value was read
        self.sized: list[Tensor] = []  # captured tensors whose shape was
        self.cut_by_mode = False  # something was made under `torch.no_grad`
        self._args: dict[int, Arg] = {}  # id of a symbol -> its value in the graph
        self._partial: dict[int, tuple[int, tuple]] = {}  # table[h], still to be indexed further
        self._numbers: set[int] = set()  # ids of the symbols of captured 0-d tensors
        self._made: dict[int, Tensor] = {}  # real tensors that the function made
        self._alive: list[Tensor] = []  # ids are only valid while the tensors live

    def symbol(self, arg: Arg, dtype: str | torch.dtype) -> Tensor:
        """A new 0-d meta tensor that stands for `arg`."""
        dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
        meta = torch.empty((), dtype=dtype, device="meta")
        return self.bind(meta, arg)

    def bind(self, tensor: Tensor, arg: Arg) -> Tensor:
        self._args[id(tensor)] = arg
        self._alive.append(tensor)
        return tensor

    def add_input(self, name: str, dtype: str) -> Tensor:
        self.inputs.append(Input(name, dtype))
        return self.symbol(name, dtype)

    def knows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (id(value) in self._args or id(value) in self._partial)

    # -- captured tensors ---------------------------------------------------------------------

    def is_captured(self, value: Any) -> bool:
        return isinstance(value, Tensor) and not self.knows(value) and id(value) not in self._made

    def made(self, result: Any) -> Any:
        """The result of an op on nothing that is captured."""
        for t in result if isinstance(result, list | tuple) else (result,):
            if isinstance(t, Tensor):
                self._made[id(t)] = t
        return result

    def reads_value(self) -> None:
        """Python got a number out of a captured tensor, which may be another one next time."""
        if self.value_read is None:
            place = (self.outer and user_place(self.outer)) or self.place
            self.value_read = f"reads the value of a captured tensor{quote(place)}"

    def capture(self, tensor: Tensor) -> int:
        """The number of a captured tensor; the same tensor has one number."""
        for n, known in enumerate(self.captured):
            if known is tensor:
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
        """Call a function of torch's. A captured 0-d tensor that a transform wrapped, or that may
        have a tangent, takes part as a symbol: the dispatcher, where no transform is active while
        we trace, would see through it to another tensor."""
        # By their ids. Whether one has a tangent cannot be asked here: that is an op as well.
        symbols = {
            id(x): self.number(x)
            for x in _flatten(args, kwargs)
            if self.is_captured(x)
            and (is_wrapped(x) or forward_ad._current_level >= 0)
            and x.dim() == 0
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
        if any(isinstance(x, Tensor) for x in _flatten((result,), {})):
            return result
        return func(*args, **kwargs)  # a property of the tensor, or its value

    def number(self, tensor: Tensor) -> Tensor:
        """The symbol of a captured 0-d tensor."""
        symbol = self._emit("gather", (f"t{self.capture(tensor)}",), tensor.dtype)
        self._numbers.add(id(symbol))
        return symbol

    def gather(self, table: Tensor, index: Any) -> Tensor:
        """`table[index]` with indices that are numbers or symbols, all dimensions in the end."""
        items = index if isinstance(index, tuple) else (index,)
        number, before = self._partial.get(id(table), (None, ()))
        if number is None:
            number = self.capture(table)
        source = self.captured[number]
        indices = list(before)
        for item in items:
            if isinstance(item, bool) or not (isinstance(item, int) or self.knows(item)):
                self.refuse(
                    f"indexes a captured tensor with {describe_value(item)}",
                    "index every dimension with a number or an expression of positions",
                )
            if isinstance(item, Tensor):
                if (
                    id(item) in self._partial
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
            self._partial[id(meta)] = (number, tuple(indices))
            self._alive.append(meta)
            return meta
        return self._emit("gather", (f"t{number}", *indices), source.dtype)

    # -- ops ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "item", "equal"):
            if any(self.knows(a) and id(a) not in self._numbers for a in args):
                self.refuse_decision()
            if any(self.knows(a) for a in args):
                return func(*map(sample, args), **kwargs)  # `call` asks the tensor itself
            if any(map(self.is_captured, args)):
                self.reads_value()
            return func(*args, **kwargs)
        flat = [a for a in _flatten(args, kwargs) if isinstance(a, Tensor)]
        if name in _LIFTED and not self.knows(args[0]):
            self.made(args[0])
        if not any(self.knows(t) for t in flat):
            if not any(map(self.is_captured, flat)):
                if kwargs.get("device") == torch.device("meta") and name != "empty":
                    return self._record(func, name, args, kwargs)  # autograd's own constants
                if torch.Tag.nondeterministic_seeded in func.tags:
                    self._refuse_random(func)
                return self.made(func(*args, **kwargs))  # a constant made inside the function
            if not all(t.dim() == 0 for t in flat):
                self.refuse(
                    f"computes {name} on a whole captured tensor",
                    "do it once, outside the function, and capture the result",
                )
            # `log_scale.exp()`: arithmetic on a 0-d tensor joins the graph, for its gradient.
        return self._record(func, name, args, kwargs)

    def arg(self, value: Any) -> Arg:
        """The graph's name for an operand."""
        if not isinstance(value, Tensor):
            if isinstance(value, bool | int | float):
                return value
            self.refuse(f"uses {describe_value(value)} as a number", "use numbers and tensors")
        if id(value) in self._args:
            return self._args[id(value)]
        if id(value) in self._partial or value.dim():
            self.refuse(
                f"uses a tensor of shape {tuple(value.shape)} as one number",
                "index it down to one number per pair, such as table[h, q_idx - kv_idx]",
            )
        if value.device.type == "meta":
            self.refuse("uses a tensor without data", "capture real tensors")
        if not self.is_captured(value):
            return value.item()  # a constant made inside the function
        return self._args[id(self.number(value))]

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
            if not self.knows(target) or id(target) in self._numbers:
                self.refuse("changes a captured tensor in place", "a score or mask only computes")
            if self.cuts and not torch.is_grad_enabled() and target.is_floating_point():
                self.refuse(
                    "changes a value in place under torch.no_grad()",
                    "write x = x + y there, or leave torch.no_grad() out",
                )
            return self.bind(target, arg)
        return result

    def _translate(self, func, name, args, kwargs) -> Tensor:
        """What an op of PyTorch makes of symbols; `name` is without the mark of ops in place."""
        given = Arguments(func, args, kwargs)
        if func.namespace != "aten":
            return self._decompose(func, args, kwargs)
        if name in IDENTITY or name == "detach":
            value = given.take("self")
            given.shape()
            if id(value) in self._partial:
                self.refuse(f"calls {name} on a row of a captured tensor", "index it to one number")
            arg = self.arg(value)
            self._result(func, args, kwargs, given)
            return self.symbol(self._cut(arg, value.dtype, name == "detach"), value.dtype)
        if name == "_to_copy":
            value, dtype = given.take("self"), given.take("dtype")
            self._check(func, given)
            return self._emit("to", (self.arg(value),), dtype or value.dtype)
        if name in CREATION or name in FILLED or name == "scalar_tensor":
            value = CREATION.get(name)
            if value is None:
                value = given.take("s" if name == "scalar_tensor" else "fill_value")
            for of in ("self", "dtype"):
                given.take(of)
            given.shape()
            dtype = self._result(func, args, kwargs, given)
            return self.symbol(_number(value, dtype), dtype)
        if name == "copy":  # (self, src): src in self's place
            into, value = given.take("self"), given.take("src")
            self._check(func, given)
            return self._emit("to", (self.arg(value),), into.dtype)
        if name == "where" and given.has(("condition", "self", "other")):
            values = tuple(given.take(of) for of in ("condition", "self", "other"))
            dtype = self._result(func, args, kwargs, given)
            return self._emit("where", tuple(map(self.arg, values)), dtype)
        if name == "relu":
            value = given.take("self")
            dtype = self._result(func, args, kwargs, given)
            if not (self.cuts and dtype.is_floating_point):
                return self._binary("max", value, 0, dtype)
            none = self._again(aten.le.Scalar, value, 0)  # at 0 the derivative is 0
            return self._emit("where", (self.arg(none), 0.0, self.arg(value)), dtype)
        if name == "square":
            value = given.take("self")
            return self._binary("mul", value, value, self._result(func, args, kwargs, given))
        if name in ("clamp", "clamp_min", "clamp_max"):
            value, low, high = map(given.take, ("self", "min", "max"))
            dtype = self._result(func, args, kwargs, given)
            return self._clamp(value, low, high, dtype)
        if name in ("add", "sub", "rsub") and given.has(("self", "other")):
            a, b, alpha = map(given.take, ("self", "other", "alpha"))
            dtype = self._result(func, args, kwargs, given)
            if name == "rsub":  # other - alpha * self
                a, b, name = b, a, "sub"
            if alpha != 1:
                of = isinstance(b, Tensor)
                b = self._again(aten.mul.Tensor, b, alpha) if of else b * alpha
            return self._binary(name, a, b, dtype)
        if name == "div":
            a, b, mode = map(given.take, ("self", "other", "rounding_mode"))
            ours = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}[mode]
            return self._binary(ours, a, b, self._result(func, args, kwargs, given))
        if name == "round" and "decimals" in given.given:
            value, decimals = given.take("self"), given.take("decimals")
            self._result(func, args, kwargs, given)
            scale = 10.0 ** abs(decimals)
            there, back = (aten.mul, aten.div) if decimals > 0 else (aten.div, aten.mul)
            rounded = self._again(aten.round.default, self._again(there.Tensor, value, scale))
            return self._again(back.Tensor, rounded, scale)
        if name.startswith("logical_") and name != "logical_not":
            a, b = map(given.take, ("self", "other"))
            self._result(func, args, kwargs, given)
            a, b = (
                self._again(aten.ne.Scalar, x, 0) if x.dtype != torch.bool else x for x in (a, b)
            )
            return self._binary(name.removeprefix("logical_"), a, b, torch.bool)
        ours, operands = OPS.get(name, ("", ()))
        if not operands or not given.has(operands):
            return self._decompose(func, args, kwargs)
        values = [given.take(of) for of in operands]
        dtype = self._result(func, args, kwargs, given)
        if ours == "invert" and values[0].dtype == torch.bool:
            ours = "not"
        if len(values) == 1:
            return self._unary(ours, values[0], dtype)
        return self._binary(ours, values[0], values[1], dtype)

    def _check(self, func, given: Arguments) -> None:
        """Refuse a call with an argument that was not taken into account."""
        left = given.left()
        if left is not None:
            value = describe_value(left[1]) if isinstance(left[1], Tensor) else repr(left[1])
            self.refuse(
                f"calls {full_name(func)} with {left[0]}={value}",
                "leave the argument out, or write what it does with arithmetic and torch.where",
            )

    def _result(self, func, args, kwargs, given: Arguments) -> torch.dtype:
        """The dtype of a call's result, which has to be one number. Its arguments are known."""
        self._check(func, given)
        result = func(*map(sample, args), **{n: sample(x) for n, x in kwargs.items()})
        if result.numel() != 1:
            self.refuse(
                f"makes {tuple(result.shape)} numbers of one with {full_name(func)}",
                "compute one number per pair",
            )
        return result.dtype

    def _clamp(self, value: Any, low: Any, high: Any, dtype: torch.dtype) -> Tensor:
        """At a bound the whole derivative is the value's, and not half of it as of `maximum`."""
        for op, test, limit in (("max", aten.ge, low), ("min", aten.le, high)):
            if limit is None:
                continue
            bounded = self._binary(op, value, limit, dtype)
            if self.cuts and dtype.is_floating_point:
                inside = self._again(
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

    def _again(self, func, *args) -> Tensor:
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
            have = self.builder.dtype(args[0])
            have = have or next((i.dtype for i in self.inputs if i.name == args[0]), None)
            if have == DTYPE_NAMES[dtype]:
                return self.symbol(args[0], dtype)
        arg = self.builder.emit(op, args, DTYPE_NAMES[dtype], self._line())
        return self.symbol(self._cut(arg, dtype), dtype)

    def _cut(self, arg: Arg, dtype: torch.dtype, detached: bool = False) -> Arg:
        """A value less its derivative, where it was detached or made under `torch.no_grad`."""
        if not (detached or not torch.is_grad_enabled()):
            return arg
        if not self.cuts or not isinstance(arg, str) or not dtype.is_floating_point:
            return arg
        self.cut_by_mode |= not detached
        return self.builder.emit("detach", (arg,), DTYPE_NAMES[dtype], self._line())

    # -- messages -----------------------------------------------------------------------------

    def _line(self) -> str:
        """The user's source line, as text that does not change when the function moves."""
        place = user_place(self.outer) if self.outer else None
        return linecache.getline(*place).strip() if place else ""

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

    def refuse(self, what: str, way_out: str):
        place = (self.outer and user_place(self.outer)) or self.place
        raise ModError(f"the {self.what} {what}; {way_out}{quote(place)}")


def _number(value: Any, dtype: torch.dtype) -> Any:
    """A constant as Python's kind of number: `1` of a bool tensor is True."""
    if isinstance(value, Tensor):
        return value
    return value != 0 if dtype == torch.bool else float(value) if dtype.is_floating_point else value


def describe_value(value: Any) -> str:
    """A value as messages show it."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return f"{type(value).__name__} {value!r}"


def _flatten(args, kwargs):
    for a in (*args, *kwargs.values()):
        if isinstance(a, list | tuple):
            yield from a
        else:
            yield a
