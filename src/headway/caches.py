"""What is remembered from call to call: bounded, and for any number of threads."""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from .surroundings import capturing

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
        # A copy is made at once; what dies meanwhile may take entries out.
        oldest = sorted(self._kept.copy().items(), key=lambda item: item[1][1])
        for key, _ in oldest[:count]:
            self._kept.pop(key, None)

    def discard(self, key: Hashable) -> None:
        """Forget what was made for this key. Takes no lock: finalizers may call it."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Forget all of it."""
        with self._turn:
            self._kept.clear()

    def values(self) -> list[V]:
        """All that is remembered."""
        with self._turn:
            return [value for value, _ in self._kept.copy().values()]

    def __len__(self) -> int:
        return len(self._kept)


def version_of(t: Tensor) -> int | None:
    """What changes with every write that PyTorch counts. None for a tensor made in inference mode:
    nobody counts its writes."""
    return None if t.is_inference() else t._version


class TensorCache(Cache[tuple[list[weakref.ref], list, V]]):
    """What was made of tensors, by key, and `most` of it: while they live and are not written to.

        made = cache.of(tensors, key, make)

    A tensor is known by its identity and its stamp. A write makes the value anew, in the place of
    what was; where one of its tensors dies, the value goes with it.

    While a CUDA graph is being captured nothing is looked up and nothing is kept: a replay finds
    other numbers in the same tensors, so that what is made of them has to be part of the graph.

    - `stamp`: what changes with every write to a tensor; None where nothing does, so that the value
      is made anew each time.
    - `in_captures`: values are found and kept then, too: they are the host's, which cannot read.
    """

    clears: ClassVar[int] = 0  # how often all of them were cleared
    _all: ClassVar[list["TensorCache"]] = []

    def __init__(
        self, most: int, stamp: Callable[[Tensor], Any] = version_of, in_captures: bool = False
    ) -> None:
        super().__init__(most)
        self._stamp, self._in_captures = stamp, in_captures
        self._all.append(self)

    def of(self, tensors: Sequence[Tensor], key: Hashable, make: Callable[[], V]) -> V:
        """What was made of these tensors for this key; `make()` where that is not known."""
        if not self._in_captures and any(capturing(t.device) for t in tensors):
            return make()
        stamps = [self._stamp(t) for t in tensors]
        if None in stamps:
            return make()
        known = key, *[id(t) for t in tensors]
        found = self.get(known)
        if found is not None:
            refs, before, made = found
            if before == stamps and all(ref() is t for ref, t in zip(refs, tensors, strict=True)):
                return made
        made = make()
        died = partial(self._died, known)
        self.put(known, ([weakref.ref(t, died) for t in tensors], stamps, made))
        return made

    def _died(self, known: Hashable, ref: weakref.ref) -> None:
        found = self.get(known)
        if found is not None and any(of is ref for of in found[0]):  # not of others at its address
            self.discard(known)

    @classmethod
    def clear_all(cls) -> None:
        """Forget what was made of any tensors."""
        cls.clears += 1
        for cache in cls._all:
            cache.clear()
