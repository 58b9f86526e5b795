"""What `make test` leaves out: files here, and the cases elsewhere that are marked `long`.

A case of a table of kernels is marked if other cases of its file take all code that it takes
(`covering.py` shows that they do); `make test-long` runs everything.
"""

from collections.abc import Container, Iterable
from functools import partial
from typing import Any

import pytest

long = partial(pytest.param, marks=pytest.mark.long)


def long_unless(kept: Container[Any], rows: Iterable[Any]) -> list[Any]:
    """Return the rows of a table, those marked that are not in `kept`."""
    of = lambda row: long(*row) if isinstance(row, tuple) else long(row)
    return [row if row in kept else of(row) for row in rows]
