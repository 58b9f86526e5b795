"""Process groups by name, and what is kept for each."""

from collections.abc import Hashable
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import _resolve_process_group

from ..errors import ArgumentError

V = TypeVar("V")


class GroupDict(dict[Hashable, V]):
    """Values that all ranks of a group make together, by the group or a tuple that begins with it.

    A rank that made one anew would wait for the others, which have theirs: so no number bounds
    them, and those of a destroyed group go when the next one is put.
    """

    def put(self, key: Hashable, value: V) -> V:
        """Store a value; return it."""
        for other in list(self):
            if not _exists(other[0] if isinstance(other, tuple) else other):
                self.pop(other, None)
        self[key] = value
        return value


def _exists(group: Any) -> bool:
    """Return whether a group was not destroyed."""
    try:
        return resolve_group(group.group_name) is group
    except ArgumentError:
        return False


def resolve_group(name: str) -> Any:
    """Return the process group of that name.

    **Raises:** `ArgumentError` where it was destroyed.
    """
    try:
        return _resolve_process_group(name)  # type: ignore[bad-argument-type]
    except (RuntimeError, ValueError, KeyError) as error:
        raise ArgumentError(
            f"the layout's process group {name!r} was destroyed, or was made in another process; "
            "make the group and the layout anew"
        ) from error


def check_place(group: Any, rank: int, ranks: int) -> tuple[int, int]:
    """Return rank and ranks of a group.

    **Raises:** `ArgumentError` where they are not those of the layout.
    """
    place = group.rank(), group.size()
    if place != (rank, ranks):
        raise ArgumentError(
            f"the layout is of rank {rank} of {ranks}, but this is rank {place[0]} of {place[1]}: "
            "the process group was made anew; make the layout again"
        )
    return place
