"""Errors of the drop-ins: ours, and of the type that the original raises as well."""

from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, BackendRefused, ModError
from ..types import inlined_or_eager


class CallError(ArgumentError, RuntimeError):
    """An error for calls that the original refuses with a `RuntimeError`."""


class CallTypeError(ArgumentError, TypeError):
    """An argument of a type that the original refuses with a `TypeError`."""


class CallAssertionError(ArgumentError, AssertionError):
    """An error for calls that the original refuses with an `AssertionError`."""


class CallAttributeError(ArgumentError, AttributeError):
    """An argument whose attributes the original looks for in vain."""


class CallModError(ModError, RuntimeError, AssertionError):
    """A score or mask that cannot become part of a kernel: the original raises one or the other."""


class NotSupported(BackendRefused):
    """An error for calls that the original refuses with a `NotImplementedError`, or that only it
    supports."""


@inlined_or_eager
def as_call_error(check: Callable, *arguments: Any, **options: Any) -> Any:
    """Return what a function returns; what it refuses is a `CallError` or `CallModError`."""
    try:
        return check(*arguments, **options)
    except ArgumentError as error:
        raise CallError(str(error)) from None
    except ModError as error:
        raise CallModError(str(error)) from None
