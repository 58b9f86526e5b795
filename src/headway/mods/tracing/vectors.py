"""Translate ops on tensors of several values: what moves elements, reads them, or reduces them."""

import math
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ..ops import UNROLLED_IN_KERNELS
from .arrays import UNROLLED, Array, Index, IndexRefused, Value, constants, reduced, strided
from .aten import OpCall, full_name, sample
from .values import as_constant, flatten_arguments

# -- elements that move ---------------------------------------------------------------------------

# These are no views, and take 0-d tensors along a dimension.
SHAPING = frozenset({"stack", "cat", "gather", "take", "index_select"})


def view(call: OpCall) -> Any:
    """Translate a view: the same view of a tensor without data says where its elements are."""
    tracer, func = call.tracer, call.func
    source, *rest = call.args
    if not source.dim() and not tracer.is_symbol(source):
        source = tracer.symbol_of_number(source)
    array = tracer.array(source)
    without_data = torch.empty(array.shape, dtype=source.dtype, device="meta")
    views = func(without_data, *rest, **call.kwargs)
    results = []
    for view in views if isinstance(views, list | tuple) else (views,):
        same = view.dtype == source.dtype and view.untyped_storage()._cdata == (
            without_data.untyped_storage()._cdata
        )
        if not same or func._overloadname == "dtype" or call.name == "as_strided" or _tensors(rest):
            call.take("self")
            call.refuse_unused()
            tracer.refuse(f"calls {full_name(func)}", "use other views")
        moved = view.shape != array.shape or view.stride() != without_data.stride()
        if moved:
            tracer.note_shape(array)
        part = strided(array, view, tracer._emit_index) if moved else array
        elements: Value = part if part.shape else tracer.element(part, ())
        if call.name == "detach":
            elements = tracer.detached(elements, source.dtype)
        else:
            tracer.refuse_unlinked(source)
        results.append(tracer.symbol(elements, source.dtype))
    tracer.share(source, *results)
    return results if isinstance(views, list | tuple) else results[0]


def _tensors(args: Any) -> bool:
    return any(isinstance(a, Tensor) for a in flatten_arguments(tuple(args), {}))


def same(call: OpCall) -> Tensor:
    """Translate an op that returns its operand."""
    value = call.take("self")
    call.on_samples()
    return call.tracer.symbol(call.tracer.operand(value), value.dtype)


def move(call: OpCall) -> Tensor:
    """Translate an op that only moves elements: what it does to their numbers says where from."""
    tracer = call.tracer
    dtype = call.func(*map(sample, call.args), **call.kwargs).dtype
    elements: list[Any] = []

    def numbered(value: Any) -> Any:
        if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
            return [numbered(v) for v in value]
        if not isinstance(value, Tensor):
            return value
        operand = tracer.cast(value, dtype)
        array = operand if isinstance(operand, Array) else Array((), lambda index: operand)
        tracer.note_shape(array)
        _refuse_long(call, array.size)
        first = len(elements)
        elements.extend((array, index) for index in array.indices())
        return torch.arange(first, len(elements), device="cpu").view(array.shape)

    numbers = call.func(*map(numbered, call.args), **call.kwargs)
    source = constants(numbers)

    def at(index: Index) -> Any:
        if any(isinstance(i, str) for i in index):
            raise IndexRefused(f"indexes the result of {full_name(call.func)} with a value")
        array, place = elements[source.at(index)]  # type: ignore[index]
        return array.at(place)

    return tracer.symbol(Array(source.shape, at), dtype)


def create(call: OpCall, value: Any = None) -> Tensor:
    """Translate the making of a tensor of one number."""
    tracer = call.tracer
    if value is None:
        value = call.take("s" if call.name == "scalar_tensor" else "fill_value")
    source: Any = call.pending.get("self")
    for argument in ("self", "dtype", *_SHAPE_ARGUMENTS):
        call.take(argument)
    made = call.on_samples()
    shape = tuple(made.shape)
    if call.name.endswith("_like"):
        array = tracer.array(source) if source.dim() else None
        shape = () if array is None else array.shape
        tracer.note_shape(array)
    constant = as_constant(value, made.dtype)
    if isinstance(constant, Tensor):
        constant = tracer.arg(constant)
    return tracer.symbol(Array(shape, lambda index: constant), made.dtype)


_SHAPE_ARGUMENTS = ("size", "shape")


def to(call: OpCall) -> Tensor:
    """Translate a conversion."""
    value, dtype = call.take("self"), call.take("dtype")
    call.refuse_unused()
    return call.tracer.emit("to", (call.tracer.operand(value),), dtype or value.dtype)


def copy(call: OpCall) -> Tensor:
    """Translate `copy(self, src)`: src with the dtype of self."""
    target, value = call.take("self"), call.take("src")
    call.refuse_unused()
    if value.dim() > target.dim():
        call.tracer.refuse("copies a tensor into a smaller one", "copy like into like")
    return call.tracer.emit("to", (call.tracer.operand(value),), target.dtype)


# -- reads ----------------------------------------------------------------------------------------


def index_select(call: OpCall) -> Tensor:
    """Translate `index_select`."""
    table, dim, index = map(call.take, ("self", "dim", "index"))
    call.refuse_unused()
    before = (slice(None),) * (dim % max(table.dim(), 1))
    with call.tracer:
        index = index.reshape(-1)
    return call.tracer.index(table, (*before, index))


def take(call: OpCall) -> Tensor:
    """Translate `take`."""
    table, index = call.take("self"), call.take("index")
    call.refuse_unused()
    with call.tracer:
        flat = table.reshape(-1)
    return call.tracer.index(flat, index)


def gather(call: OpCall) -> Tensor:
    """Translate `gather`."""
    table, dim, index = map(call.take, ("self", "dim", "index"))
    call.take("sparse_grad")
    call.refuse_unused()
    with call.tracer:
        table, index = table.reshape(table.shape or (1,)), index.reshape(index.shape or (1,))
        items = []
        for d, size in enumerate(index.shape):
            place = torch.arange(size, device="cpu")
            items.append(place.reshape(-1, *[1] * (index.dim() - d - 1)))
        items[dim] = index
        result = call.tracer.index(table, tuple(items))
        return result if call.args[2].dim() else result.reshape(())


def index(call: OpCall) -> Any:
    """Translate an index by tensors and None."""
    table, indices = call.take("self"), call.take("indices")
    call.refuse_unused()
    return call.tracer.index(table, tuple(slice(None) if i is None else i for i in indices))


def _search(call: OpCall, table: Tensor, values: Any, right: bool) -> Tensor:
    """Return how many of the sorted numbers of a table come before each value, as an index."""
    tracer = call.tracer
    for argument in ("sorted_sequence", "boundaries", "self", "input", "right", "side"):
        call.take(argument)
    dtype = torch.int32 if call.take("out_int32") else torch.int64
    call.refuse_unused()
    common = torch.result_type(*map(sample, (table, values)))
    sequence, operand = tracer.array(table), tracer.cast(values, common)
    tracer.note_shape(sequence, operand)
    length, op = sequence.shape[-1], "gt" if right else "ge"
    value = partial(tracer.value, line=tracer._line())

    def before(row: Index, i: Any, number: Any) -> Any:
        """Return whether number i of a row comes before a number; NaN comes last."""
        read = value("to", (sequence.at((*row, i)),), common)
        return value("not", (value(op, (read, number), torch.bool),), torch.bool)

    def count(row: Index, number: Any) -> Any:
        total: Any = 0
        if length <= UNROLLED_IN_KERNELS or not sequence.captured:
            _refuse_long(call, length)
            for i in range(length):
                one = value("to", (before(row, i, number),), torch.int64)
                total = value("add", (total, one), torch.int64)
            return total
        step = 1 << (length.bit_length() - 1)
        while step:  # `total` numbers come before; are there `step` more?
            last = value("add", (total, step - 1), torch.int64)
            inside = value("lt", (last, length), torch.bool)
            place = value("min", (last, length - 1), torch.int64)
            more = value("and", (inside, before(row, place, number)), torch.bool)
            more = value("mul", (value("to", (more,), torch.int64), step), torch.int64)
            total, step = value("add", (total, more), torch.int64), step // 2
        return total

    shape = operand.shape if isinstance(operand, Array) else ()

    def at(index: Index) -> Any:
        number = operand.at(index) if isinstance(operand, Array) else operand
        row = index[:-1] if len(sequence.shape) > 1 else ()
        return value("to", (count(row, number),), dtype)

    if len(sequence.shape) > 1 and sequence.shape[:-1] != shape[:-1]:
        tracer.refuse(
            f"calls searchsorted with {sequence.shape} numbers for {shape} values",
            "search in one row: index it first",
        )
    return tracer.symbol(Array(shape, at), dtype)


def bucketize(call: OpCall) -> Tensor:
    """Translate `bucketize`."""
    table = call.pending["boundaries"]
    return _search(call, table, call.pending["self"], bool(call.pending.get("right")))


def searchsorted(call: OpCall) -> Tensor:
    """Translate `searchsorted`."""
    right = bool(call.pending.get("right")) or call.pending.get("side") == "right"
    return _search(call, call.pending["sorted_sequence"], call.pending["self"], right)


# -- reductions -----------------------------------------------------------------------------------


def _refuse_long(call: OpCall, count: int) -> None:
    if count > UNROLLED:
        call.tracer.refuse(
            f"reduces {count} numbers per pair with {call.tracer.written or call.name}; at most "
            f"{UNROLLED} are unrolled",
            "compute it once, outside the function, and capture the result",
        )


def reduce_short(call: OpCall, op: str) -> Any:
    """Translate a reduction of a short vector, which is unrolled."""
    tracer = call.tracer
    value, dim, keep = call.take("self"), call.take("dim"), bool(call.take("keepdim"))
    call.take("dtype")
    if len(call.func._schema.returns) > 1:  # max.dim
        return NotImplemented
    result = call.on_samples()
    dtype = compute = result.dtype
    dims = [dim] if isinstance(dim, int) else list(dim or range(value.dim()))
    dims = [d % max(value.dim(), 1) for d in dims]
    if dtype in (torch.bfloat16, torch.float16) and op in ("add", "mul"):
        compute = torch.float32  # as PyTorch accumulates
    operand = tracer.cast(value, compute)
    array = operand if isinstance(operand, Array) else Array((), lambda index: operand)
    tracer.note_shape(array)
    dims = [d for d in dims if array.shape]
    count = math.prod(array.shape[d] for d in dims)
    _refuse_long(call, count)
    value_of = partial(tracer.value, line=tracer._line())
    shared = op in ("max", "min") and tracer.record_detach and compute.is_floating_point

    def fold(numbers: list[Any]) -> Any:
        every = numbers
        while len(numbers) > 1:  # in pairs, as sums are more exact
            pairs = zip(numbers[::2], numbers[1::2], strict=False)
            odd = numbers[len(numbers) & ~1 :]
            numbers = [value_of(op, pair, compute) for pair in pairs] + odd
        if not numbers:
            empty = {"add": 0, "mul": 1, "or": False, "and": True}
            if op not in empty:
                tracer.refuse(f"calls {call.name} on no numbers", "reduce at least one")
            return as_constant(empty[op], compute)
        (result,) = numbers
        if shared and count > 1 and isinstance(result, str):
            # As PyTorch's, the derivative is shared by all numbers that are largest.
            hits = [
                value_of("to", (value_of("eq", (x, result), torch.bool),), compute) for x in every
            ]
            total = reduce(lambda a, b: value_of("add", (a, b), compute), hits)
            result = value_of("detach", (result,), compute)
            for x, hit in zip(every, hits, strict=True):
                slope = value_of("div", (hit, total), compute)
                result = value_of("tangent", (result, x, slope), compute)
        if count > UNROLLED_IN_KERNELS and isinstance(result, str):
            return value_of("unrolled", (result, count), compute)
        return result

    reduction = tracer.symbol(reduced(array, dims, keep, fold), compute)
    return reduction if dtype == compute else tracer.emit(
        "to", (tracer.operand(reduction),), dtype
    )  # fmt: skip


def mean(call: OpCall) -> Tensor:
    """Translate a mean of a short vector."""
    value, count = call.args[0], 1
    dim = call.pending.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or range(value.dim()))
    for d in dims:
        count *= value.shape[d]
    keep = bool(call.pending.get("keepdim"))
    dtype = call.pending.get("dtype") or value.dtype
    with call.tracer:
        exact = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        return (value.to(exact).sum(dims, keepdim=keep) / count).to(dtype)


def matmul(call: OpCall) -> Tensor:
    """Translate the products of vectors and matrices."""
    a, b = call.args
    dtype = torch.result_type(a, b)
    half = dtype in (torch.bfloat16, torch.float16)
    with call.tracer:
        if half:
            a, b = a.float(), b.float()
        if b.dim() > 1:  # (..., n, k) (..., k, m)
            a, b = a.unsqueeze(-1), b.unsqueeze(-3)
        return (a * b).sum(-2 if b.dim() > 1 else -1).to(dtype)


def isin(call: OpCall) -> Tensor:
    """Translate `isin`."""
    tracer = call.tracer
    elements = call.take("elements") if "elements" in call.pending else call.take("element")
    tests = call.take("test_elements") if "test_elements" in call.pending else None
    tests = call.take("test_element") if tests is None else tests
    invert = bool(call.take("invert"))
    call.take("assume_unique")
    call.refuse_unused()
    with tracer:
        tests = tests.reshape(-1) if isinstance(tests, Tensor) else tests
        many = isinstance(tests, Tensor) and isinstance(elements, Tensor)
        hits = (elements.unsqueeze(-1) == tests).any(-1) if many else torch.any(elements == tests)
        return ~hits if invert else hits
