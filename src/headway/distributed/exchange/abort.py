"""The end of a consistency check: ranks that differ all raise, and none is left waiting."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...errors import ArgumentError
from .consistency import ConsistencyCheck
from .pull import abort_transfers


def wait_or_abort(check: ConsistencyCheck) -> None:
    """Wait for a check. Where it fails, abort the transfers that have begun. Every call that ranks
    compare ends here, since all of them have to abort together."""
    try:
        check.wait()
    except Exception as error:
        all_present = isinstance(error, ArgumentError)  # any other error: a rank has left
        abort_transfers(check, all_present)
        raise


def check_consistency(
    operation: str, fields: Callable[[], Sequence[int]], group: Any, device: torch.device,
    forward_number: int = 0,
) -> int:  # fmt: skip
    """Wait until all ranks are known to do the same, and return the number of the check.

    - `fields`: returns the numbers to compare. If it raises, this rank raises, after it has told
      the others.

    **Raises:** `ArgumentError`, on every rank, where one differs or refuses.
    """
    try:
        numbers = fields()
    except Exception:
        with suppress(ArgumentError):
            wait_or_abort(ConsistencyCheck(operation, None, group, device, forward_number))
        raise
    check = ConsistencyCheck(operation, numbers, group, device, forward_number)
    wait_or_abort(check)
    return check.number
