"""What is remembered from call to call: bounded, and for any number of threads."""

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Cache(Generic[V]):
    """What was made last, by key, and `most` of it. Where there is no room, an eighth is forgotten:
    what nobody has asked for the longest.

        found = cache.get(key)
        if found is None:
            found = cache.put(key, make())

    There is no `key in cache` and no `cache[key]`: what is there may be gone at the next look.
    Threads that look for one key at once may each make what it stands for; the last one's stays.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Values, each with when it was last asked for. A look-up is one `dict.get`, which is whole
        # by itself in every Python, and takes no lock; whatever changes the dictionary takes turns.
        self._kept: dict[Hashable, list] = {}
        # Reentrant: a user's `__eq__` may compare keys, and finalizers run anywhere.
        self._turn = threading.RLock()
        self._now = 0  # threads may count as one: that blurs an order, and breaks nothing

    def get(self, key: Hashable) -> V | None:
        """What was made for this key, if it is remembered. TypeError if it cannot be hashed."""
        found = self._kept.get(key)
        if found is None:
            return None
        self._now = found[1] = self._now + 1
        return found[0]

    def put(self, key: Hashable, value: V) -> V:
        """Remember it for this key, in the place of what was."""
        with self._turn:
            self._kept.pop(key, None)
            if len(self._kept) >= self.most:
                self._forget(len(self._kept) - self.most + max(1, self.most // 8))
            self._now += 1
            self._kept[key] = [value, self._now]
        return value

    def _forget(self, count: int) -> None:
        oldest = sorted(self._kept.items(), key=lambda item: item[1][1])
        for key, _ in oldest[:count]:
            self._kept.pop(key, None)

    def clear(self) -> None:
        """Forget all of it."""
        with self._turn:
            self._kept.clear()

    def values(self) -> list[V]:
        """All that is remembered."""
        with self._turn:
            return [value for value, _ in self._kept.values()]

    def __len__(self) -> int:
        return len(self._kept)
