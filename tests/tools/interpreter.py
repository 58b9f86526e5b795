"""Triton's interpreter without what it does for nothing: a quarter of its time is left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# Types of what is no constant of the compiler, and holds none.
PLAIN = {
    int, bool, float, str, type(None), core.dtype, core.pointer_type, core.block_type, core.tensor,
}  # fmt: skip


@contextmanager
def quicker() -> Iterator[None]:
    """Inside, the interpreter computes the same with less work.

    A launch replaces the functions of `triton.language` once for the globals of a function, where
    Triton does it at every call of a device function. Integers are not computed a second time to
    look for an overflow: outside of Triton's debug mode nobody is told of what that finds. Types
    are values: those of a name are made once, with what every tensor takes from its type. And what
    becomes of the operands of an operation follows from their types, and from the numbers among
    them: it is found once. NumPy broadcasts by itself.
    """
    patch: Callable[[Callable], Any] = interpreter._patch_lang
    run = interpreter.GridExecutor.__call__
    builder = interpreter.interpreter_builder
    seen: set[int] = set()  # the globals that were looked at in this launch

    def once(fn: Callable) -> Any:
        if id(fn.__globals__) in seen:
            return None  # for a device function: nobody asks for it
        seen.add(id(fn.__globals__))
        return patch(fn)

    def launch(self: Any, *args: Any, **named: Any) -> None:
        seen.clear()
        run(self, *args, **named)

    unwrap, broadcast = core._unwrap_if_constexpr, TritonSemantic.broadcast_impl_value
    operands_of = TritonSemantic.binary_op_type_checking_impl
    block_type, tensor = core.block_type.__init__, core.tensor.__init__
    np_dtype = interpreter._get_np_dtype
    shapes: dict[tuple[int, ...], Any] = {}  # one object for each shape
    types: dict[Any, dict[str, Any]] = {}  # attributes of a block type
    tensors: dict[str, dict[str, Any]] = {}  # attributes of a tensor of a type
    np_dtypes: dict[str, Any] = {}
    operands: dict[tuple, tuple[Any, Any] | None] = {}  # what replaces each: a type, a number

    def unwrapped(value: Any) -> Any:
        return value if type(value) in PLAIN else unwrap(value)

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([unwrapped(n) for n in shape])
        if (element_ty.name, sizes) not in types:
            block_type(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            types[element_ty.name, sizes] = vars(self)
        self.__dict__ = types[element_ty.name, sizes]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            tensor(self, handle, type)
            tensors[type.name] = vars(self)
        self.__dict__ = {**tensors[type.name], "handle": handle, "type": type}

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        same = getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None)
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def operands_once(self: Any, lhs: Any, rhs: Any, *options: bool) -> tuple[Any, Any]:
        key = _kind(lhs), _kind(rhs), options
        if key not in operands:
            made = operands_of(self, lhs, rhs, *options)
            pairs = [*zip((lhs, rhs), made, strict=True)]
            cast = any(type(x) is core.tensor and x.dtype != y.dtype for x, y in pairs)
            operands[key] = None if cast else tuple(
                [y.type if type(x) is core.tensor else y for x, y in pairs]
            )  # fmt: skip
            return made
        known = operands[key]
        if known is None:
            return operands_of(self, lhs, rhs, *options)
        return _replaced(lhs, known[0]), _replaced(rhs, known[1])

    def patch_attribute(obj: Any, name: str, member: Callable, builder: Any, scope: Any) -> None:
        semantic = TritonSemantic(builder)
        called = getattr(member, "__wrapped__", member)  # without a look for the semantic

        def with_semantic(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return called(*args, **named)

        scope.set_attr(obj, name, with_semantic)

    def as_numpy(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    assert not builder.options.debug
    with (
        mock.patch.object(core, "_unwrap_if_constexpr", unwrapped),
        mock.patch.object(core.block_type, "__init__", init_block_type),
        mock.patch.object(core.tensor, "__init__", init_tensor),
        mock.patch.object(TritonSemantic, "broadcast_impl_value", of_one_shape),
        mock.patch.object(TritonSemantic, "binary_op_type_checking_impl", operands_once),
        mock.patch.object(interpreter, "_patch_attr", patch_attribute),
        mock.patch.object(interpreter, "_get_np_dtype", as_numpy),
        mock.patch.object(interpreter, "_patch_lang", once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch),
        mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
    ):
        yield


def _kind(x: Any) -> Any:
    """A tensor's type, or which number it is."""
    return x.type.name if type(x) is core.tensor else (type(x), str(x))


def _replaced(x: Any, by: Any) -> Any:
    if type(x) is not core.tensor:
        return by
    return x if x.type is by or x.type.name == by.name else core.tensor(x.handle, by)
