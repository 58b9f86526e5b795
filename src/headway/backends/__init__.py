"""Choose a backend for a call: the table of backends, and the order in which they are asked."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from ..errors import ArgumentError, BackendRefused
from ..types import Spec, constant_under_compile
from . import cpu, first_use, hopper, reference, triton
from .base import Backend, Call, CapabilityKey

# In order of preference: "auto" takes the first that can run the call.
_BACKENDS: dict[str, Backend] = {
    "cpu": cpu,  # type: ignore[dict-item]
    "hopper": hopper,  # type: ignore[dict-item]
    "triton": triton,  # type: ignore[dict-item]
    "reference": reference,  # type: ignore[dict-item]
}
NAMES = tuple(_BACKENDS)
_SELF_TESTED = ("hopper",)  # before their first use (`first_use`)


class Available(NamedTuple):
    """A row of `table()`."""

    name: str
    available: bool
    reason: str


def get(name: str) -> Backend:
    """Return the backend of that name."""
    if name not in _BACKENDS:
        raise ArgumentError(
            f"backend={name!r} is not known; choose one of 'auto', {', '.join(map(repr, NAMES))}"
        )
    return _BACKENDS[name]


def choose(name: str, spec: Spec, kind: CapabilityKey, call: Call | None = None) -> str:
    """Return the backend to run: the named one, if it can run the call; with "auto" the first that
    can, unless it is slower at such calls than the next.

    **Raises:** `BackendRefused` with the call and every reason of every backend asked.
    """
    refusals = []
    for candidate in order(name, spec, kind):
        reasons = reasons_against(candidate, spec, kind, call)
        if not reasons:
            return candidate
        refusals += [f"{candidate}: {reason}" for reason in reasons]
    raise BackendRefused(_refusal(name, call, refusals))


def order(name: str, spec: Spec, kind: CapabilityKey) -> tuple[str, ...]:
    """Return the backends to ask, the preferred one first. Raises ArgumentError for a name that
    no backend has."""
    if name != "auto":
        get(name)
        return (name,)
    *fast, last = NAMES
    if kind.moves and kind.device.type != "cpu":  # a card's memory does not hold the reference's
        return tuple(fast)
    return (*sorted(fast, key=lambda n: slower(n, spec, kind) != ""), last)


def slower(name: str, spec: Spec, kind: CapabilityKey) -> str:
    """Return why "auto" prefers another backend for such calls; empty if it does not."""
    return hopper.slower(spec, kind) if name == "hopper" else ""


def reasons_against(
    name: str, spec: Spec, kind: CapabilityKey, call: Call | None = None
) -> list[str]:
    """Return why a backend cannot run such calls; empty if it can. A backend is self-tested before
    its first use on a GPU, while the kernels of `call` compile. Calls over a cache run another
    backend's kernel and need no self-test."""
    reasons = get(name).reasons_against(spec, kind)
    if not reasons and name in _SELF_TESTED and not kind.cache:
        # (A rank's part of a sequence, `scattered`, has tiles of the whole, and other kernels.)
        ahead = not kind.scattered and not is_compiling()
        if ahead and call is not None and type(call.q) is torch.Tensor:
            _self_test(name, kind.device, partial(_compile_ahead, name, spec, call))
        failure = _self_test_failure(name, kind.device.type, kind.device.index)
        return [failure] if failure else []
    return reasons


def needs_self_test(device: torch.device) -> bool:
    """Return whether the next call on this GPU will run a self-test."""
    return device.type == "cuda" and any(
        not first_use.has_verdict(_self_tested(name), device) and _runs_on(name, device)
        for name in _SELF_TESTED
    )


@lru_cache
def _runs_on(name: str, device: torch.device) -> bool:
    return not get(name).unavailable(device.type, device.index)  # type: ignore[attr-defined]


def _self_test(
    name: str, device: torch.device, precompile: Callable[[], None] | None = None
) -> str:
    return first_use.failure_reason(_self_tested(name), _BACKENDS["reference"], device, precompile)


def _self_tested(name: str) -> first_use.SelfTested:
    return get(name)  # type: ignore[return-value]


@torch.no_grad()
def _compile_ahead(name: str, spec: Spec, call: Call) -> None:
    _self_tested(name).compile_ahead(replace(spec, backend=name), call)


def _self_test_failure(name: str, device: str, index: int | None) -> str:
    return _self_test(name, torch.device(device, index))  # type: ignore[arg-type]


constant_under_compile(_self_test_failure)


def _refusal(name: str, call: Call | None, refusals: list[str]) -> str:
    matrices = [] if call is None else (call.q, call.k, call.v)
    shapes = ", ".join(
        f"{letter} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
        for letter, t in zip("qkv", matrices, strict=False)
    )
    listed = "".join(f"\n  - {r}" for r in refusals)
    return f"backend={name!r} cannot run this call ({shapes}):{listed}"


def table() -> list[Available]:
    """Return every backend, and whether this machine can run it."""
    no_hopper, no_triton = _why_unavailable(hopper), _why_unavailable(triton)
    return [
        Available("cpu", True, "the default where tensors are on the CPU"),
        Available(
            "hopper", not no_hopper, no_hopper or "the default for bfloat16 and float16 on a GPU "
            "of compute capability 9.0; any score, any mask"
        ),
        Available(
            "triton", not no_triton, no_triton or "the default elsewhere on a GPU; any score, any "
            "mask"
        ),
        Available("reference", True, "the definition in float64; slow, any device"),
    ]  # fmt: skip


def _why_unavailable(backend: ModuleType) -> str:
    """Return why a backend runs on no GPU of this machine; empty if it runs on one."""
    if not torch.cuda.is_available():
        gpu_runtime = torch.version.cuda or torch.version.hip
        return (
            "PyTorch sees no GPU"
            if gpu_runtime
            else "this PyTorch is built for the CPU only: https://pytorch.org has builds for GPUs"
        )
    reasons = [_why_unavailable_on(backend, n) for n in range(torch.cuda.device_count())]
    return "" if "" in reasons else reasons[0]


def _why_unavailable_on(backend: ModuleType, index: int) -> str:
    reason = backend.unavailable("cuda", index)
    return (
        _self_test_failure(backend.name, "cuda", index)
        if not reason and backend.name in _SELF_TESTED
        else reason
    )
