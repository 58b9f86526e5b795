"""A dispatch mode that records what a function does to symbols.

Symbols are tensors on the "meta" device: 0-d, or short vectors and views of captured tensors, whose
elements `arrays.py` knows. The mode sees every aten op on them, below autograd, so it also records
derivatives. What an op becomes is in `translate.py`; an op that has no translation is refused with
the user's file, line and op.
"""

import linecache
import operator
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import ModError
from ...surroundings import is_wrapped
from ..graph import DTYPE_NAMES, DTYPES, Arg, Builder, Input
from .arrays import Array, Index, IndexRefused, Value, constants, elementwise, indexed
from .aten import full_name, sample
from .functions import is_unlinked
from .locations import Location, quote, user_location
from .translate import RULES, translate
from .values import describe_value, flatten_arguments

_LIFTED = ("lift_fresh", "lift_fresh_copy")  # of torch.tensor(...), whose creation no mode sees
_INDEX_REMEDY = "index captured tensors, within their shape; make tensors outside the function"


class Symbol(Tensor):
    """A tensor that stands for values; it also has what Python's numbers have and tensors lack."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return other // self, other % self

    def __round__(self, decimals: int | None = None) -> Tensor:
        return self.round() if decimals is None else self.round(decimals=decimals)


class Tracer(TorchDispatchMode):
    """A recorder of aten ops on symbols and on the tensors that they meet.

    A tensor that is neither a symbol nor made by the function is captured.

    - `record_detach`: record where `detach` and `torch.no_grad` cut the derivative.
    - `gradients`: symbols require grad, so that autograd shows which values a
      `torch.autograd.Function` made (`functions.py`).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not load its compiler to skip this mode."""
        return False

    def __init__(self, subject: str, record_detach: bool = False, gradients: bool = False) -> None:
        super().__init__()
        self.subject = subject
        self.record_detach, self.gradients = record_detach, gradients
        self.needs_gradients = False  # an op of another library may have a derivative of its own
        self.location: Location | None = None  # the function's first line
        self.outer: CodeType | None = None  # the code that called the traced function
        self.replayed: Location | None = None  # the line of a recorded call that is replayed
        self.builder = Builder()
        self.inputs: list[Input] = []
        self.captured: list[Tensor] = []
        self.value_read: str | None = None  # the line where a captured tensor's value was read
        self.shape_read: list[Tensor] = []  # captured tensors whose shape was read
        self.no_grad_used = False  # a value was computed under `torch.no_grad`
        self.values: dict[int, Value] = {}  # id of a symbol -> its value, or those of its elements
        self.translating = 0  # ops that are being translated, one inside the other
        self.written = ""  # the function of torch that runs, as the user wrote it
        self.library_ops: dict[int, str] = {}  # id of a symbol -> the op of a library that made it
        self.linking = False  # the backward of a Function runs, with what its forward saved
        self._places: dict[int, Location | None] = {}  # id of a symbol of an array -> its line
        self.linked: set[int] = set()  # ids of results of autograd Functions, with derivatives
        self._shared: set[int] = set()  # ids of the symbols that are views, or have views
        self._captured_numbers: set[int] = set()  # ids of the symbols of captured 0-d tensors
        self._own_tensors: dict[int, Tensor] = {}  # tensors with data that the function made
        self.symbols: list[Tensor] = []  # kept alive: ids are only valid while the tensors live

    def symbol(self, value: Value, dtype: str | torch.dtype) -> Tensor:
        """Return a new meta tensor that stands for a value, or for an array of them."""
        dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
        if isinstance(value, Array) and not value.shape:
            value = self.element(value, ())
        if not torch.is_grad_enabled():
            self.no_grad_used = True
            value = self.detached(value, dtype)
        shape = value.shape if isinstance(value, Array) else ()
        symbol = torch.empty(shape, dtype=dtype, device="meta")
        symbol.__class__ = Symbol
        if shape:
            self._places[id(symbol)] = self._place()
        return self.bind(symbol, value)

    def bind(self, tensor: Tensor, value: Value) -> Tensor:
        self.values[id(tensor)] = value
        self.symbols.append(tensor)
        return tensor

    def add_input(self, name: str, dtype: str) -> Tensor:
        self.inputs.append(Input(name, dtype))
        return self.symbol(name, dtype)

    def is_symbol(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self.values

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
            self.value_read = f"reads the value of a captured tensor{quote(self._place())}"

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

        A captured tensor that a transform wrapped, or that may have a tangent, is replaced by a
        symbol: no transform is active while we trace, so the dispatcher would unwrap it.
        """
        # By id. Asking whether a tensor has a tangent would be an op of its own.
        symbols = {
            id(arg): self.symbol_of_captured(arg)
            for arg in flatten_arguments(args, kwargs)
            if self.is_captured(arg) and (is_wrapped(arg) or forward_ad._current_level >= 0)
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

    def symbol_of_captured(self, tensor: Tensor) -> Tensor:
        """Return a symbol of a captured tensor, of all its elements."""
        if not tensor.dim():
            return self.symbol_of_number(tensor)
        symbol = self.symbol(self.array(tensor), tensor.dtype)
        if self.gradients and tensor.is_floating_point():
            symbol.requires_grad_()
        return symbol

    def symbol_of_number(self, tensor: Tensor) -> Tensor:
        """Return the symbol of a captured 0-d tensor."""
        symbol = self.emit("gather", (f"t{self.capture(tensor)}",), tensor.dtype)
        if self.gradients and tensor.is_floating_point():
            symbol.requires_grad_()
        self._captured_numbers.add(id(symbol))
        return symbol

    def array(self, tensor: Tensor) -> Array:
        """Return the elements of a symbol, a captured tensor, or one that the function made."""
        value = self.values.get(id(tensor))
        if value is None and not self.is_captured(tensor):
            return constants(tensor)
        if value is None:
            number = self.capture(tensor)

            def read(index: Index) -> Arg:
                return self.value("gather", (f"t{number}", *index), tensor.dtype)

            return Array(tuple(tensor.shape), read, frozenset({number}), captured=True)
        return value if isinstance(value, Array) else Array((), lambda index: value)

    def index(self, table: Tensor, index: Any) -> Tensor:
        """Return `table[index]`, of numbers, symbols, slices, None, `...` and integer tensors."""
        items = list(index) if isinstance(index, tuple) else [index]
        source, dims = self.array(table), sum(item is not None for item in items)
        if any(item is Ellipsis for item in items):
            place = next(n for n, item in enumerate(items) if item is Ellipsis)
            items[place : place + 1] = [slice(None)] * (len(source.shape) - dims + 1)
            dims = len(source.shape)
        if dims and not source.shape:
            self.refuse("indexes a value that is one number", "index captured tensors only")
        if dims > len(source.shape):
            self.refuse(
                f"indexes a {len(source.shape)}-d tensor of shape {source.shape} with "
                f"{dims} indices",
                "use one index per dimension",
            )
        items = list(map(self._index_item, items))
        if any(isinstance(item, Array | slice | None) for item in items):
            self.note_shape(source)
        try:
            array = indexed(source, items, self._emit_index)
        except IndexRefused as error:
            self.refuse(str(error), _INDEX_REMEDY)
        except (ValueError, RuntimeError) as error:
            self.refuse(f"indexes a tensor of shape {source.shape}: {error}", _INDEX_REMEDY)
        result = self.symbol(array, table.dtype)
        if not any(isinstance(item, Array) for item in items):
            self._shared |= {id(table), id(result)}  # as PyTorch's, a view
        if self.gradients and result.is_floating_point() and torch.is_grad_enabled():
            result.requires_grad_()
        return result

    def _index_item(self, item: Any) -> Any:
        """Return an index as a number, a value, an array of values, a slice or None."""
        if isinstance(item, list | range):
            item = self.note_own(torch.tensor(list(item), device="cpu"))
        if isinstance(item, slice):
            if any(isinstance(end, Tensor) for end in (item.start, item.stop, item.step)):
                self.refuse(
                    "slices a captured tensor with a value",
                    "slice with numbers, and index with values",
                )
            return item
        if isinstance(item, Tensor):
            if item.dtype.is_floating_point or item.dtype == torch.bool:
                self.refuse(
                    f"indexes a captured tensor with a {item.dtype} value",
                    "indices must be integers: convert with .long()",
                )
            return self.cast(item, torch.int64)
        if item is None or (hasattr(item, "__index__") and not isinstance(item, bool)):
            return item if item is None else operator.index(item)
        self.refuse(
            f"indexes a captured tensor with {describe_value(item)}",
            "index with numbers, slices and expressions of positions",
        )

    def _emit_index(self, op: str, args: tuple[Arg, ...], dtype: str) -> Arg:
        return self.builder.emit(op, args, dtype, self._line())

    def note_shape(self, *values: Any) -> None:
        """Note that the graph depends on the shapes of the captured tensors that arrays are of."""
        for value in values:
            if isinstance(value, Array):
                self.shape_read += [self.captured[n] for n in value.tables]

    def element(self, array: Array, index: Index) -> Arg:
        """Return an element of an array."""
        try:
            return array.at(index)
        except IndexRefused as error:
            self.refuse(str(error), _INDEX_REMEDY)

    # -- ops ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        self.translating += 1
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self.translating -= 1

    def _dispatch(self, func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        if not any(self.is_symbol(t) or self.is_captured(t) for t in flat):
            if kwargs.get("device") == torch.device("meta") and name != "empty":  # a symbol's
                if name in RULES:
                    return self.record(func, args, kwargs)
                kwargs = {**kwargs, "device": torch.device("cpu")}
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._refuse_random(func)
            return self.note_own(func(*args, **kwargs))  # a constant made inside the function
        return self.record(func, args, kwargs)

    def operand(self, value: Any) -> Value:
        """Return an operand as a value of the graph, a number, or an array of them."""
        if not isinstance(value, Tensor):
            if isinstance(value, bool | int | float):
                return value
            self.refuse(f"uses {describe_value(value)} as a number", "use numbers and tensors")
        if id(value) in self.values:
            self.refuse_unlinked(value)
            return self.values[id(value)]
        if value.device.type == "meta":
            self.refuse("uses a tensor without data", "capture real tensors")
        if value.dim():
            return self.array(value)
        if not self.is_captured(value):
            return value.item()  # a constant made inside the function
        return self.values[id(self.symbol_of_number(value))]

    def refuse_unlinked(self, value: Tensor) -> None:
        """Refuse the result of an autograd Function whose backward would be lost."""
        if self.gradients and not self.linking and is_unlinked(self, value):
            self.refuse("uses an autograd Function in code that is not Python", "call it in Python")

    def arg(self, value: Any) -> Arg:
        """Return an operand that is one number."""
        operand = self.operand(value)
        if isinstance(operand, Array):
            self.refuse(
                f"uses a tensor of shape {operand.shape} as one number",
                "index it down to one number per pair, such as table[h, q_idx - kv_idx], or "
                "reduce it, such as x.any(-1)",
                self._places.get(id(value)),
            )
        return operand

    def record(self, func, args, kwargs) -> Any:
        """Record an op on symbols; return the symbols of its results."""
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._refuse_random(func)
        if any(a.is_out and a.kwarg_only for a in func._schema.arguments):
            self.refuse(f"calls {full_name(func)} with out=", "use what the op returns")
        inplace = name.endswith("_") and not name.endswith("__")
        result = translate(self, func, name[:-1] if inplace else name, args, kwargs)
        if not inplace:
            return result
        target = args[0]
        value = self.cast(result, target.dtype)
        if not self.is_symbol(target) or id(target) in self._captured_numbers:
            whose = "captured" if self.is_captured(target) else "new"
            self.refuse(
                f"changes a {whose} tensor in place", "a score or mask only computes: torch.stack"
            )
        if self.record_detach and not torch.is_grad_enabled() and target.is_floating_point():
            self.refuse(
                "changes a value in place under torch.no_grad()",
                "write x = x + y there, or leave torch.no_grad() out",
            )
        if id(target) in self._shared or result.shape != target.shape:
            self.refuse(
                "changes in place a value that shares its memory with a view",
                "write x = x + y, or torch.stack([...]) for its elements",
            )
        return self.bind(target, value)

    def share(self, *tensors: Tensor) -> None:
        """Note that tensors share their memory, as views do."""
        self._shared.update(map(id, tensors))

    def call_op(self, func, *args) -> Tensor:
        return self.record(func, args, {})

    def cast(self, value: Any, dtype: torch.dtype) -> Value:
        """Return an operand, converted to a dtype."""
        operand = self.operand(value)
        if isinstance(value, Tensor) and value.dtype != dtype:
            return self.operand(self.emit("to", (operand,), dtype))
        if not isinstance(operand, str | Array) and dtype.is_floating_point:
            return float(operand)
        return operand

    def emit(self, op: str, operands: tuple[Value, ...], dtype: torch.dtype) -> Tensor:
        """Return the symbol of an op's result, element by element."""
        if dtype not in DTYPE_NAMES:
            self.refuse(f"makes a value of dtype {dtype}", "use float, int and bool values")
        self.note_shape(*operands)
        line = self._line()
        try:
            result = elementwise(lambda *args: self.value(op, args, dtype, line), *operands)
        except (IndexRefused, RuntimeError) as error:
            self.refuse(f"combines tensors that do not fit: {error}", "broadcast them")
        return self.symbol(result, dtype)

    def value(
        self, op: str, args: tuple[Arg, ...], dtype: torch.dtype, line: str | None = None
    ) -> Arg:
        """Return the value of an op on numbers."""
        if op == "to" and isinstance(args[0], str):
            source = self.builder.dtype(args[0])
            source = source or next((i.dtype for i in self.inputs if i.name == args[0]), None)
            if source == DTYPE_NAMES[dtype]:
                return args[0]
        return self.builder.emit(
            op, args, DTYPE_NAMES[dtype], self._line() if line is None else line
        )

    def detached(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a value behind a `detach` node, if its derivative counts."""
        if not self.record_detach or not dtype.is_floating_point:
            return value
        line = self._line()
        return elementwise(
            lambda arg: self.value("detach", (arg,), dtype, line) if isinstance(arg, str) else arg,
            value,
        )

    # -- messages -----------------------------------------------------------------------------

    def _line(self) -> str:
        """Return the user's source line as text, which stays when the function moves."""
        location = self._running_line()
        return linecache.getline(*location).strip() if location else ""

    def refuse_decision(self) -> None:
        self.refuse(
            "makes a Python decision on the value of a symbol (if, while, and, or, not, int(), "
            "float(), .item())",
            "use torch.where(condition, a, b), and & | ~ in place of and, or, not",
        )

    def _refuse_random(self, func) -> None:
        self.refuse(
            f"calls {full_name(func)}, which would be drawn once, not at every call",
            "draw outside the function and capture the tensor",
        )

    def _running_line(self) -> Location | None:
        return self.replayed or (user_location(self.outer) if self.outer else None)

    def _place(self) -> Location | None:
        return self._running_line() or self.location

    def refuse(self, problem: str, remedy: str, place: Location | None = None):
        place = place or self._place()
        raise ModError(f"the {self.subject} {problem}; {remedy}{quote(place)}")
