"""Triton's hash of itself, which is part of every key of its cache.

Triton reads 400 megabytes for it, 0.3 to 0.6 s of every process. The hash is recorded in Triton's
cache with what the file system says of Triton's files: while no inode, size or time is another, no
file has changed (docs/lab/host.md, 2026-11-23 and 2026-11-28).
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from triton.runtime import cache

import triton

from ...records import Record

# Clocks of file systems are coarse: a file that is written again so soon may keep its times.
_SETTLED_SECONDS = 10.0


@lru_cache(maxsize=1)
def triton_hash() -> str:
    """Return what Triton's own `triton_key` returns."""
    package = Path(triton.__file__).parent
    files = sorted(_stats(package))
    digest = sha256(repr(files).encode()).hexdigest()
    record = Record(Path(triton.knobs.cache.dir), {"Triton": str(package), "files": digest})
    recorded = record.read()
    if recorded is not None:
        return recorded
    own_hash = cache.triton_key()
    last_change = max((change for *_, change in files), default=0) / 1e9
    if sorted(_stats(package)) == files and last_change < time.time() - _SETTLED_SECONDS:
        record.write(own_hash)
    return own_hash


def _stats(folder: Path) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield of every readable file its path, inode, size, and the times when its content and its
    inode changed. A program can set the first time back, but not the second."""
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = os.path.join(parent, name)
            with suppress(OSError):  # a link to nothing
                file = os.stat(path)
                yield path, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns
