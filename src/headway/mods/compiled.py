"""Lower scores and masks under `torch.compile`. Dynamo traces this code.

A function that was made outside what is compiled is traced once, as a constant, with guards of all
that it reads (`tracing.guards`). Dynamo cannot hand over any other: closures that are made inside,
methods, partials, objects. These are recorded while Dynamo traces them (`tracing.recording`).
"""

import operator
import types
from collections.abc import Callable
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from ..errors import HeadwayError, ModError
from ..types import Captured, constant_under_compile, refuse_under_compile
from .graph import DTYPES
from .lowering import Lowered, find_source, first_opaque_read, lower, trace_structure
from .tracing.capture import collect_reads
from .tracing.guards import Guard, global_hooks, guard_holds, resolve_path
from .tracing.key_guards import count_traced, guard_constant, guard_recorded
from .tracing.recording import FunctionRecorder, Recording, Replay

# From PyTorch 2.13 on, Dynamo guards the attributes of classes and takes methods for constants.
GUARDS_CLASSES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def lower_under_compile(
    kind: str, structure: str, dtype: str, functions: list[Callable], captured: Captured,
    factors: list[Tensor],
) -> tuple[Lowered, Captured]:  # fmt: skip
    """Return the graph of a structure, and what it captures; logits are products of `factors`."""
    if all(_is_constant(fn) for fn in functions):
        lowered = lower_guarded(kind, structure, dtype, *functions)
        _check_guards(functions, lowered.guards)
        for fn in functions:  # noqa: B007 - the next line reads its name
            guard_constant("fn")
        paths = lowered.capture_paths
        tensors = [resolve_path(functions[n], path) for n, path in paths]
        return lowered, captured._replace(tensors=captured.tensors + tensors)
    global_hooks()  # Dynamo guards it, and runs what is registered
    recorders, outputs, names = [], [], []
    for fn in functions:
        recorder = FunctionRecorder(kind, DTYPES[dtype], factors)
        guard_reads(kind, "fn", None)
        first = count_traced()
        outputs.append(recorder.run(fn))
        recorders.append(recorder)
        names.append(guard_reads(kind, "fn", first))
    symbolic = True
    while True:
        recordings = [
            r.recording(output, symbolic) for r, output in zip(recorders, outputs, strict=True)
        ]
        lowered = lower_recorded(kind, structure, dtype, tuple(names), tuple(recordings))
        if lowered is None:  # something asks for a number itself, such as the size of a view
            symbolic = False
            continue
        # The graph depends on these shapes: where they are symbols, they become constants.
        shapes = [recorders[n].captured[index].shape for n, index in lowered.shape_sources]
        sizes = [recordings[n][2][index][2] for n, index in lowered.shape_sources]
        if not any(-1 in known for known in sizes):
            break
        for shape in shapes:
            for size in shape:
                operator.index(size)
    made = (
        [recorder.tensors() for recorder in recorders]
        if symbolic
        else [r.captured for r in recorders]
    )
    tensors = [made[n][index] for n, index in lowered.capture_sources]
    ints = [number for recorder in recorders for number in recorder.ints] if symbolic else []
    return lowered, Captured(captured.tensors + tensors, captured.ints + ints, captured.floats)


def _is_constant(fn: Any) -> bool:
    """Return whether Dynamo can hand a function to code that runs while it traces."""
    if type(fn) is not types.FunctionType:
        return False
    return not _is_made_inside(fn)


def _is_made_inside(fn: types.FunctionType) -> bool:
    """Return whether a function is created by the code that is compiled."""
    try:
        fn.__globals__  # noqa: B018
    except AttributeError:
        return True
    return False


def _check_guards(functions: list[Callable], guards: tuple[tuple[int, Guard], ...]) -> None:
    """Read what guards read, so that Dynamo guards it."""
    for n, guard in guards:
        if not guard_holds(functions[n], guard):
            raise ModError(f"what a score or mask reads changed while it was compiled: {guard[0]}")


def guard_reads(kind: str, name: str, first: int | None) -> str:
    """Guard what a recorded function can read, and return its name; refuse what cannot be."""
    function, reason = guard_recorded(name, first)
    if reason is not None:
        _refuse(kind, reason)
    return function


def _refuse(kind: str, reason: str) -> None:
    refuse_under_compile(
        ModError,
        f"the {kind} function {reason}\n  so it has to be traced at every call, which "
        "torch.compile cannot do; make it a tensor that the function indexes, or a number, "
        "attribute or item that it reads by name, or compile without fullgraph=True",
    )


def lower_guarded(kind: str, structure: str, dtype: str, *functions: Callable) -> Lowered:
    """Lower functions while Dynamo traces the call; return the graph with the guards to set."""
    try:
        lowered, _ = lower(kind, structure, dtype, *functions)
        guarded_reads = [collect_reads(fn, guarding=True) for fn in functions]
    except HeadwayError as error:
        refuse_under_compile(type(error), str(error))
    reason = lowered.retrace_reason or first_opaque_read(guarded_reads)
    if reason is not None:
        _refuse(kind, reason)
    plain_reads = [collect_reads(fn) for fn in functions]

    def guarded_source(n: int, index: int) -> tuple[int, int]:
        """Return the source of the same tensor in the guarded walk, whose order differs."""
        return find_source(guarded_reads, plain_reads[n].tensors[index][1])  # type: ignore[return-value]

    sources = list(starmap(guarded_source, lowered.capture_sources))
    paths = [(n, guarded_reads[n].tensors[index][0]) for n, index in sources]
    guards = [(n, guard) for n, r in enumerate(guarded_reads) for guard in r.guards]
    if not GUARDS_CLASSES and (name := _class_attribute(guards)) is not None:
        refuse_under_compile(
            ModError,
            f"the {kind} function reads {name} of a class, which torch.compile before PyTorch 2.13 "
            "takes for a constant; make it an attribute of the object, or compile without "
            "fullgraph=True",
        )
    for n, index in starmap(guarded_source, lowered.shape_sources):
        path, tensor = guarded_reads[n].tensors[index]
        guards.append((n, (path, "shape", tuple(tensor.shape))))
    return lowered._replace(capture_paths=tuple(paths), guards=tuple(guards))


def _class_attribute(guards: list[tuple[int, Guard]]) -> str | None:
    """Return the name of an attribute that a function reads from a class, if any."""
    for _, (path, _, _) in guards:
        for step, key in path:
            if step in ("class", "type"):
                return key[1]
    return None


def lower_recorded(
    kind: str, structure: str, dtype: str, names: tuple[str, ...], recordings: tuple[tuple, ...]
) -> Lowered | None:
    """Lower functions that were recorded; None if their symbolic numbers have to be constants."""
    replays = [
        Replay(name, DTYPES[dtype], Recording(*fields))
        for name, fields in zip(names, recordings, strict=True)
    ]
    symbolic = any(None in (*r.recording.ints, *r.recording.floats) for r in replays)
    reads = [replay.reads for replay in replays]
    try:
        lowered, _ = trace_structure(kind, structure, dtype, tuple(replays), reads, None)
    except HeadwayError as error:
        if symbolic:
            return None
        refuse_under_compile(type(error), str(error))
    if lowered.retrace_reason is None:
        return lowered
    if not symbolic:
        _refuse(kind, lowered.retrace_reason)
    return None


for _function in (lower_guarded, lower_recorded, guard_reads, guard_constant, count_traced):
    constant_under_compile(_function)
