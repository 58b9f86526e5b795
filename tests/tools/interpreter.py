"""Triton's interpreter without what it does for nothing: a quarter of its time is left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from triton.runtime import interpreter


@contextmanager
def quicker() -> Iterator[None]:
    """Inside, the interpreter computes the same with less work.

    A launch replaces the functions of `triton.language` once for the globals of a function, where
    Triton does it at every call of a device function. And integers are not computed a second time
    to look for an overflow: outside of Triton's debug mode nobody is told of what that finds.
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

    assert not builder.options.debug
    with (
        mock.patch.object(interpreter, "_patch_lang", once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch),
        mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)),
    ):
        yield
