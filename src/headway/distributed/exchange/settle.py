"""What ranks do where they turn out to differ: all raise, and go on with what they do next."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...errors import ArgumentError
from .agreement import Agreement
from .pull import abandon


def settle(agreement: Agreement) -> None:
    """Wait for the agreement; where there is none, let go of what was begun. Whatever a rank does
    that others compare with, it ends so: letting go takes all of them."""
    try:
        agreement.wait()
    except Exception as error:
        everyone = isinstance(error, ArgumentError)  # else a rank is not there any more
        abandon(agreement, everyone)
        raise


def agree(
    does: str, make: Callable[[], Sequence[int]], group: Any, device: torch.device, of: int = 0
) -> int:
    """Wait until all ranks are known to do the same; the number of that comparison.

    - `make`: the fields. What it raises this rank raises, when the others know of it.

    **Raises:** `ArgumentError`, on every rank, where one differs or refuses.
    """
    try:
        fields = make()
    except Exception:
        with suppress(ArgumentError):
            settle(Agreement(does, None, group, device, of))
        raise
    agreement = Agreement(does, fields, group, device, of)
    settle(agreement)
    return agreement.number
