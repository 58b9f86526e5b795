"""Triton's start-up, half a second of a process, half of it beside the preparation of a first call.

Triton hashes itself at its first use: the hash is part of every key of its cache, so no kernel is
compiled before. That takes 0.3 to 0.6 s where it is not recorded (triton_hash.py), here in a
thread. A C compiler builds the module of Triton's driver meanwhile, 0.4 s with an empty cache
(docs/lab/host.md, 2026-11-23).
"""

from contextlib import suppress
from functools import lru_cache
from threading import Thread

from triton.runtime import driver

import triton

from .triton_hash import triton_hash


@lru_cache(maxsize=1)
def start_triton() -> Thread | None:
    """Make Triton's driver, once, and return the thread that hashes Triton.

    **Returns:** None for the interpreter, which needs neither.
    """
    if triton.knobs.runtime.interpret:
        return None
    hashing = Thread(target=_hash_triton)
    hashing.start()
    with suppress(Exception):  # raised again where the driver is needed
        driver.active  # noqa: B018
    return hashing


def wait_for_triton() -> None:
    """Wait until Triton can compile and launch kernels."""
    if hashing := start_triton():
        hashing.join()


def _hash_triton() -> None:
    with suppress(Exception):  # tried again where the hash is needed
        triton_hash()
