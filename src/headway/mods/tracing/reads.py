"""What a function can read: the result of the walk in `capture.py`."""

import types
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .guards import Guard, Path


class FunctionReads:
    """All that a function can read.

    - `tensors`: the captured tensors, each once, with their paths.
    - `key`: everything else, and which objects are the same one; equal keys mean equal reads.
    - `codes`: the code objects that were followed; a trace that runs others is not reused.
    - `modules`: the ids of modules that were followed to all that they have.
    - `guards`: the checks that `torch.compile` makes in every call; empty unless asked for.
    - `fully_guarded`: Dynamo guards all of these, the rest is compared by the key.
    - `queries_torch`: a function that queries torch's state is among them.
    - `opaque_read`: the first read that cannot be followed, with its location; None if all can.
    """

    __slots__ = (
        "codes", "fully_guarded", "guards", "key", "modules", "opaque_read", "queries_torch",
        "tensors",
    )  # fmt: skip

    def __init__(self) -> None:
        self.tensors: list[tuple[Path, Tensor]] = []
        self.key: list[Any] = []
        self.codes: set[types.CodeType] = set()
        self.modules: set[int] = set()
        self.guards: list[Guard] = []
        self.fully_guarded = True
        self.queries_torch = False
        self.opaque_read: str | None = None


class DeferredLookup:
    """An object whose attributes are looked up once their names are known.

    `names_done` counts the attribute names that were looked up already.
    """

    __slots__ = ("ancestors", "names_done", "number", "object", "path")

    def __init__(self, value: Any, path: Path, ancestors: tuple, number: int) -> None:
        self.object, self.path, self.ancestors, self.number = value, path, ancestors, number
        self.names_done = 0


def aliasing_pattern(reads: Sequence[FunctionReads]) -> tuple[int, ...]:
    """Return which captured tensors of several functions are one and the same.

    A trace of several functions has one input for a tensor that two of them capture. It can only
    be reused for functions that share tensors in the same way, so its key holds this pattern.
    """
    if len(reads) == 1:
        return ()
    ids = [id(tensor) for function_reads in reads for _, tensor in function_reads.tensors]
    return tuple([ids.index(n) for n in ids])
