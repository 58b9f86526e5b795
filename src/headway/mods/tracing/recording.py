"""Record a score or mask function while `torch.compile` traces the call of it.

Dynamo runs the function on meta tensors, inside the compiled region, so it guards by itself what
the function reads. A function mode, which Dynamo traces as well, writes down every call of PyTorch:
the function, its arguments and its results. `Replay` makes these calls again, on the symbols of a
trace. A tensor that no recorded call made is captured: it stays an input of Dynamo's graph, so
gradients reach it. A symbolic number becomes a number of the run.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import HeadwayError, ModError
from ...types import constant_under_compile, fixed, refuse_under_compile
from ..graph import POSITIONS
from .key_guards import allow_side_effects, current_frame
from .locations import Location, is_internal_file, quote
from .reads import FunctionReads
from .tracer import Tracer

# A value of a recording, as constants: ("tensor", (number, dtype)), ("int", number),
# ("float", number),
# ("list", values), ("tuple", values), ("slice", values), or ("constant", value).
Reference = tuple[str, Any]

_CONSTANTS = (
    bool, int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_SEQUENCES = list, tuple  # (Dynamo makes no unions of types)
_NUMBERS = int, float
try:
    import numpy as np

    _NUMPY: tuple[type, ...] = (np.ndarray, np.generic)
except ImportError:  # a copy on the Hugging Face Hub needs PyTorch alone
    _NUMPY = ()
_READS = "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal"


class RecordedCall(NamedTuple):
    """A call of PyTorch by a score or mask."""

    function: Callable
    args: Reference
    kwargs: tuple[tuple[str, Reference], ...]
    result: Reference
    grad_enabled: bool
    location: Location | None


class Recording(NamedTuple):
    """The calls that a function made.

    - `captured`: number, dtype and shape of every captured tensor; a symbolic size is -1.
    - `ints`, `floats`: the symbolic numbers that it reads, as constants; None if unknown.
    """

    calls: tuple[tuple, ...]
    output: Reference
    captured: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]
    ints: tuple[int | None, ...]
    floats: tuple[float | None, ...]


class FunctionRecorder(TorchFunctionMode):
    """A function mode that writes down the calls of PyTorch. Dynamo traces its code."""

    def __init__(self, kind: str, dtype: torch.dtype, factors: list[Tensor]) -> None:
        super().__init__()
        self.kind, self.dtype, self.factors = kind, dtype, factors
        self.device = factors[0].device if factors else "cpu"
        self.numbers: dict[Tensor, int] = {}  # of every tensor; the symbols have the first
        self.nodes: dict[str | None, Reference] = {}  # tensors by their node in Dynamo's graph
        self.calls: list[tuple] = []
        self.captured: list[Tensor] = []
        self.ints: list[Any] = []  # symbols of Dynamo's
        self.floats: list[Any] = []
        self.grad_enabled = torch.is_grad_enabled()

    def run(self, fn: Callable) -> Reference:
        """Run the function on symbols; return the reference of its result."""
        symbols = []
        if self.kind == "score":
            # Where it has a gradient, Dynamo puts autograd Functions in graphs of their own.
            sums = [_on_meta(x).to(self.dtype).sum() for x in self.factors]
            symbols.append(torch.stack(sums).sum())
        symbols += [torch.empty((), dtype=torch.int64, device="meta") for _ in POSITIONS]
        for symbol in symbols:
            self.bind(symbol)
        name_failures(self.kind)
        # The stack of modes, which is as before in the end, exists outside of a checkpoint's body.
        before = allow_side_effects(True)
        with self:
            allow_side_effects(before)
            result = fn(*symbols)
            allow_side_effects(True)
        allow_side_effects(before)
        return self.reference(result)

    def recording(self, output: Reference, symbolic: bool) -> tuple:
        """Return the fields of a `Recording`; Dynamo guards the numbers that are not symbolic."""
        captured = [(self.numbers[t], t.dtype, _constant_shape(t)) for t in self.captured]
        return (
            tuple(self.calls), output, tuple(captured),
            tuple([None if symbolic else operator.index(n) for n in self.ints]),
            tuple([None if symbolic else fixed(x) for x in self.floats]),
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the replayed function captures; an operator's list of floats
        cannot hold symbols, so symbolic floats are tensors."""
        one = functools.partial(torch.ones, (), dtype=self.dtype, device=self.device)
        return self.captured + [one() * x for x in self.floats]  # (`full` would take a constant)

    def __torch_function__(self, func, types, args: tuple[Any, ...] = (), kwargs=None):
        kwargs = kwargs or {}
        if name_of(func) in _READS:
            refuse_read(self.kind, name_of(func))
        if func is Tensor.__iter__:  # (Dynamo does not call it)
            item = functools.partial(self.__torch_function__, Tensor.__getitem__, types)
            return iter([item((args[0], n)) for n in range(args[0].shape[0])])
        if func is Tensor.__getitem__ or func is operator.getitem:  # (the latter: torch.export)
            result = _indexed(args[0], args[1])
        else:
            result = func(*_on_meta(args), **{name: _on_meta(kwargs[name]) for name in kwargs})
        if not _has_tensor(result) and result is not None:  # a shape, or a dtype
            return result
        references = self.reference(args)
        named = [(name, self.reference(value)) for name, value in kwargs.items()]
        self.record(func, references, tuple(named), result)
        return result

    def record(self, func: Callable, args: Reference, named: tuple, result: Any) -> None:
        """Write down a call of PyTorch."""
        # Inside a caller's no_grad there is no derivative that the function could cut.
        grad_enabled = torch.is_grad_enabled() or not self.grad_enabled
        self.calls.append((func, args, named, self.bind(result), grad_enabled, traced_line()))

    def record_item(self, item: Tensor) -> bool:
        """Write down how Dynamo took a tensor from another (`a, c = t`, `for x in t`), which no
        function mode sees; return whether it did."""
        index: list[int] = []
        for node, place in path_of_item("item"):
            index.insert(0, place)
            if node in self.nodes:
                args = "tuple", (self.nodes[node], ("constant", tuple(index)))
                self.record(Tensor.__getitem__, args, (), item)
                return True
        return False

    def reference(self, value: Any) -> Reference:
        """Return the reference of a value; a tensor that was not seen before is captured."""
        if isinstance(value, _NUMPY):
            refuse_value(self.kind, "NumPy's")
        if isinstance(value, Tensor):
            if value not in self.numbers:
                if value.device.type != "meta":
                    self.captured.append(value)
                elif not self.record_item(value):
                    refuse_value(self.kind, "the result of an autograd Function, or of other code")
            return self.bind(value)
        if isinstance(value, _SEQUENCES):
            kind = "list" if isinstance(value, list) else "tuple"
            return kind, tuple([self.reference(item) for item in value])
        if isinstance(value, slice):
            ends = value.start, value.stop, value.step
            return "slice", tuple([self.reference(end) for end in ends])
        if not isinstance(value, _CONSTANTS):
            refuse_value(self.kind, type(value).__name__)
        if isinstance(value, _NUMBERS) and not isinstance(value, bool) and not is_static(value):
            is_float = isinstance(value, float)
            numbers = self.floats if is_float else self.ints
            numbers.append(value)
            return "float" if is_float else "int", len(numbers) - 1
        return "constant", value

    def bind(self, value: Any) -> Reference:
        """Return the reference of a result; the tensors in it get numbers."""
        if isinstance(value, Tensor):
            if value not in self.numbers:
                self.numbers[value] = len(self.numbers)
            reference = "tensor", (self.numbers[value], value.dtype)
            self.nodes[node_of("value")] = reference
            return reference
        if isinstance(value, _SEQUENCES):
            return "tuple", tuple([self.bind(item) for item in value])
        return "constant", None


def _constant_shape(t: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, -1 for symbols (which may have become constants)."""
    return tuple([operator.index(n) if is_static(n) else -1 for n in t.shape])


def is_static(number: Any) -> bool:
    """Return whether Dynamo takes a number for a constant."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(number)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, _SEQUENCES):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, Tensor)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.device.type == "meta" else value.to("meta")
    if isinstance(value, _SEQUENCES):
        return type(value)([_on_meta(item) for item in value])
    # A symbol would be compiled as a constant where an op takes no tensor in its place.
    return value if type(value) is not float or is_static(value) else 1.0


def _indexed(table: Tensor, index: Any) -> Tensor:
    """Return `table[index]` on the meta device; PyTorch would read an index of one number."""
    items = []
    for item in _on_meta(index if isinstance(index, tuple) else (index,)):
        is_number = isinstance(item, Tensor) and item.dim() == 0 and item.dtype != torch.bool
        items.append(0 if is_number else item)
    return _on_meta(table)[tuple(items)]


def name_of(func: Any) -> str:
    """Return the name of a function of PyTorch."""
    return getattr(func, "__name__", "")


def traced_line() -> Location | None:
    """Return the line of the user's that Dynamo is tracing."""
    return _users_line(torch._guards.TracingContext.extract_stack())


def _users_line(stack: Any) -> Location | None:
    for frame in reversed(stack):
        if not is_internal_file(frame.filename):
            return frame.filename, frame.lineno or 0
    return None


def name_failures(kind: str) -> None:
    """Let what Dynamo says of the functions that the traced frame calls begin with our words."""
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.exc import ObservedException, TorchRuntimeError, Unsupported, UserError

    tx = current_frame()
    if tx is None:
        return
    inline = tx.inline_user_function_return

    def inline_named(*args: Any, **kwargs: Any) -> Any:
        try:
            # Dynamo writes `assert symbol` into its graph, where no recording would see it.
            with dynamo_config.patch(rewrite_assert_with_torch_assert=False):
                return inline(*args, **kwargs)
        except (Unsupported, ObservedException, TorchRuntimeError, UserError) as error:
            if isinstance(error, HeadwayError):
                raise
            line = quote(_users_line(getattr(error, "real_stack", None) or ()) or traced_line())
            refuse_under_compile(
                ModError, f"the {kind} function {_failure(error)}{line}\n\n{error}"
            )

    tx.inline_user_function_return = inline_named


def _failure(error: Exception) -> str:
    """Return what a function did that Dynamo cannot trace, and what to write instead."""
    what = (str(error) or type(error).__name__).splitlines()[0]
    if what == "Data-dependent branching" or what.startswith("Could not guard on data-dependent"):
        return (
            "makes a Python decision on the value of a symbol (if, while, and, or, not); use "
            "torch.where(condition, a, b), and & | ~ in place of and, or, not"
        )
    if what.startswith("failed to bind arguments"):
        takes = ", ".join(POSITIONS)
        return f"takes other arguments; a score takes (score, {takes}), a mask ({takes})"
    return (
        f"cannot be traced by torch.compile ({what}); use numbers, tensors and functions of torch, "
        "or compile without fullgraph=True"
    )


def _graph_node(name: str) -> Any:
    """Return the node in Dynamo's graph of a tensor that a local of the traced frame holds."""
    tx = current_frame()
    return None if tx is None else tx.symbolic_locals[name].as_proxy().node


def node_of(name: str) -> str | None:
    """Return the name of the node in Dynamo's graph of a tensor that a local holds."""
    node = _graph_node(name)
    return None if node is None else node.name


def version_of(name: str) -> tuple[str, str, int]:
    """Return which program Dynamo traces, the node of the tensor in a local, and its version."""
    node = _graph_node(name)
    if node is None:
        return "", "", 0
    program = str(torch._guards.CompileContext.current_compile_id())
    return program, node.name, node.meta["example_value"]._version


def path_of_item(name: str) -> tuple[tuple[str, int], ...]:
    """Return the nodes that the tensor in a local is an item of an item of, with its places."""
    path, node = [], _graph_node(name)
    while node is not None and node.target is operator.getitem and type(node.args[1]) is int:
        path.append((node.args[0].name, node.args[1]))
        node = node.args[0]
    return tuple(path)


def refuse_read(kind: str, name: str) -> None:
    """Refuse a function that reads the value of a tensor."""
    refuse_under_compile(
        ModError,
        f"the {kind} function reads the value of a tensor ({name}), which torch.compile cannot do; "
        "use torch.where(condition, a, b), and & | ~ in place of and, or, not, index captured "
        f"tensors, or compile without fullgraph=True{quote(traced_line())}",
    )


def refuse_value(kind: str, what: str) -> None:
    """Refuse a function that computes with a value that is no constant, number or tensor."""
    refuse_under_compile(
        ModError,
        f"the {kind} function uses a value that is {what}, which cannot be followed under "
        "torch.compile; use numbers, tensors and functions of torch, or compile without "
        f"fullgraph=True{quote(traced_line())}",
    )


for _function in (
    allow_side_effects, name_of, traced_line, name_failures, node_of, version_of, path_of_item,
    refuse_read, refuse_value,
):  # fmt: skip
    constant_under_compile(_function)


class Replay:
    """A function that makes the calls of a recording, on tensors like the captured ones."""

    def __init__(self, name: str, dtype: torch.dtype, recording: Recording) -> None:
        self.__qualname__ = name
        self.recording = recording
        self.reads = FunctionReads()
        self.reads.tensors = [
            ((), torch.empty([max(n, 1) for n in shape], dtype=dtype, device="cpu"))
            for _, dtype, shape in recording.captured
        ]
        self.ints: list[Any] = list(recording.ints)
        self.floats: list[Any] = list(recording.floats)
        if None in self.floats:
            self.floats = [torch.empty((), dtype=dtype, device="cpu") for _ in self.floats]
            self.reads.tensors += [((), number) for number in self.floats]
        self.tracer: Tracer | None = None

    def start(self, tracer: Tracer) -> None:
        """Add the symbolic integers to the inputs of a trace."""
        self.tracer = tracer
        count = sum(i.name.startswith("n") for i in tracer.inputs)
        for n, number in enumerate(self.recording.ints):
            if number is None:
                self.ints[n] = tracer.add_input(f"n{count + n}", "i64")

    def __call__(self, *symbols: Tensor) -> Any:
        values: dict[int, Any] = dict(enumerate(symbols))
        for (number, _, _), (_, t) in zip(
            self.recording.captured, self.reads.tensors, strict=False
        ):
            values[number] = t
        for fields in self.recording.calls:
            call = RecordedCall(*fields)
            if self.tracer is not None:
                self.tracer.replayed = call.location
            kwargs = {name: self._read(value, values) for name, value in call.kwargs}
            with torch.set_grad_enabled(call.grad_enabled and torch.is_grad_enabled()):
                result = call.function(*self._read(call.args, values), **kwargs)
                self._bind(call.result, result, values)
        return self._read(self.recording.output, values)

    def _read(self, reference: Reference, values: dict[int, Any]) -> Any:
        kind, content = reference
        if kind == "tensor":
            return values[content[0]]
        if kind in ("int", "float"):
            return (self.ints if kind == "int" else self.floats)[content]
        if kind == "constant":
            return content
        items = [self._read(item, values) for item in content]
        return slice(*items) if kind == "slice" else items if kind == "list" else tuple(items)

    def _bind(self, reference: Reference, result: Any, values: dict[int, Any]) -> None:
        kind, content = reference
        if kind == "tensor":
            number, dtype = content  # a number that became a tensor may have widened the result
            assert dtype.is_floating_point or not result.dtype.is_floating_point, self.__qualname__
            values[number] = result if result.dtype == dtype else result.to(dtype)
        elif kind == "tuple":
            for item, part in zip(content, result, strict=True):
                self._bind(item, part, values)
