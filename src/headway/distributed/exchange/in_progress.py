"""The consistency check whose call this thread runs. What fails between the exchanges of a call is
reported to it, and the exchanges go on, since the other ranks wait for this one's part."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
# Its `check` is the `consistency.ConsistencyCheck` of this thread; None where no call runs.
this_thread = threading.local()


def guarded(compute: Callable[[], T], instead: Callable[[], T]) -> T:
    """Return `compute()`. Where it raises, or something has before, the ranks of the call are told,
    and the result is `instead()`: the call raises when its exchanges have ended."""
    check = getattr(this_thread, "check", None)
    if check is None:
        return compute()
    if check.error is None:
        try:
            return compute()
        except Exception as error:  # noqa: BLE001 raised at the end of the call
            check.fail(error)
    return instead()


def wait_for(work: Any, on_cpu: bool) -> None:
    """Wait for a collective; on a GPU, the stream waits.

    **Raises:** `RuntimeError` where a rank has left, or has given the call up.
    """
    check = getattr(this_thread, "check", None)
    if check is None or not on_cpu:
        work.wait()
    else:
        check.wait_for(work)
