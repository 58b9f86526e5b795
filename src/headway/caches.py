"""Bounded caches that any number of threads may use.

`Cache` keeps values by key; `TensorCache` keeps values computed from tensors until one of these is
modified or freed.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from .surroundings import capturing

V = TypeVar("V")


class LRUCache(Generic[V]):
    """A cache of at most `capacity` values. A full cache drops the least recently used eighth.

        value = cache.get(key)
        if value is None:
            value = cache.put(key, compute())

    There is no `key in cache` and no `cache[key]`: an entry may be gone at the next access. Threads
    that miss the same key at once may each compute the value; the last one is kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # [value, time of its last use]. A look-up is one `dict.get`, which is atomic in every
        # Python and takes no lock; whatever changes the dictionary does.
        self._entries: dict[Hashable, list] = {}
        # Reentrant: a user's `__eq__` may compare keys, and finalizers run anywhere.
        self._lock = threading.RLock()
        self._clock = 0  # threads may read the same time: the order is then approximate

    def get(self, key: Hashable) -> V | None:
        """Return the value of a key, or None. Raises TypeError if the key cannot be hashed."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._clock = entry[1] = self._clock + 1
        return entry[0]

    def put(self, key: Hashable, value: V) -> V:
        """Store a value for a key, replacing the old one; return the value."""
        with self._lock:
            self._entries.pop(key, None)
            if len(self._entries) >= self.capacity:
                self._drop_oldest(len(self._entries) - self.capacity + max(1, self.capacity // 8))
            self._clock += 1
            self._entries[key] = [value, self._clock]
        return value

    def _drop_oldest(self, count: int) -> None:
        # Copying is atomic; finalizers may remove entries meanwhile.
        oldest = sorted(self._entries.copy().items(), key=lambda item: item[1][1])
        for key, _ in oldest[:count]:
            self._entries.pop(key, None)

    def discard(self, key: Hashable) -> None:
        """Remove a key, if present. Takes no lock, since finalizers may call it."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()

    def values(self) -> list[V]:
        """Return all values."""
        with self._lock:
            return [value for value, _ in self._entries.copy().values()]

    def __len__(self) -> int:
        return len(self._entries)


def version_of(t: Tensor) -> int | None:
    """Return a counter that changes with every write that PyTorch counts.

    None for a tensor made in inference mode, whose writes are not counted.
    """
    return None if t.is_inference() else t._version


def stamp_of_numbers(t: Tensor) -> Any:
    """Return what changes with every write to a tensor of few numbers: the numbers themselves on
    the CPU, where it may share memory with NumPy, else `version_of`."""
    return t.tolist() if t.is_cpu else version_of(t)


class TensorCache(LRUCache[tuple[list[weakref.ref], list, V]]):
    """A cache of values computed from tensors, valid while these live and are not modified.

        value = cache.of(tensors, key, compute)

    A tensor is identified by its id and its stamp. After a write the value is computed again and
    replaces the old one; when one of its tensors is freed, the entry is removed.

    While a CUDA graph is being captured, the cache is not used: a replay finds other numbers in the
    same tensors, so the computation has to be part of the graph.

    - `stamp`: returns a value that changes with every write to a tensor, or None where none does.
      With None the value is computed each time.
    - `in_captures`: use the cache during captures too, for values that do not depend on data.
    """

    clears: ClassVar[int] = 0  # how often `clear_all` was called
    _all: ClassVar[list["TensorCache"]] = []

    def __init__(
        self, capacity: int, stamp: Callable[[Tensor], Any] = version_of, in_captures: bool = False
    ) -> None:
        super().__init__(capacity)
        self._stamp, self._in_captures = stamp, in_captures
        self._all.append(self)

    def of(self, tensors: Sequence[Tensor], key: Hashable, compute: Callable[[], V]) -> V:
        """Return the cached value of these tensors for this key, or `compute()` and cache it."""
        if not self._in_captures and any(capturing(t.device) for t in tensors):
            return compute()
        stamps = [self._stamp(t) for t in tensors]
        if None in stamps:
            return compute()
        full_key = key, *[id(t) for t in tensors]
        entry = self.get(full_key)
        if entry is not None:
            refs, cached_stamps, value = entry
            pairs = zip(refs, tensors, strict=True)
            if cached_stamps == stamps and all(ref() is t for ref, t in pairs):
                return value
        value = compute()
        on_free = partial(self._drop_freed, full_key)
        self.put(full_key, ([weakref.ref(t, on_free) for t in tensors], stamps, value))
        return value

    def _drop_freed(self, full_key: Hashable, ref: weakref.ref) -> None:
        entry = self.get(full_key)
        # The entry may be of other tensors at the same addresses.
        if entry is not None and any(other is ref for other in entry[0]):
            self.discard(full_key)

    @classmethod
    def clear_all(cls) -> None:
        """Clear all caches of this class."""
        cls.clears += 1
        for cache in cls._all:
            cache.clear()
