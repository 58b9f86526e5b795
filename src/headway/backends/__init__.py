"""The table of backends, and the choice among them."""

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
_CHECKED = ("hopper",)  # these run a small case before their first use (`first_use`)


class Available(NamedTuple):
    """One row of `table()`."""

    name: str
    available: bool
    reason: str


def get(name: str) -> Backend:
    """The backend of that name."""
    if name not in _BACKENDS:
        raise ArgumentError(
            f"backend={name!r} is not known; choose one of 'auto', {', '.join(map(repr, NAMES))}"
        )
    return _BACKENDS[name]


def choose(name: str, spec: Spec, kind: CapabilityKey, call: Call | None = None) -> str:
    """The backend to run: the named one, if it can run the call; with "auto" the first that can,
    unless it is slower at such calls than the next.

    **Raises:** `BackendRefused` with the call and every reason of every backend that was asked.
    """
    refusals = []
    for candidate in order(name, spec, kind):
        reasons = reasons_against(candidate, spec, kind, call)
        if not reasons:
            return candidate
        refusals += [f"{candidate}: {reason}" for reason in reasons]
    raise BackendRefused(_refusal(name, call, refusals))


def order(name: str, spec: Spec, kind: CapabilityKey) -> tuple[str, ...]:
    """The backends to ask, the preferred one first."""
    if name != "auto":
        return (name,)
    *fast, last = NAMES
    return (*sorted(fast, key=lambda n: slower(n, spec, kind) != ""), last)


def slower(name: str, spec: Spec, kind: CapabilityKey) -> str:
    """Why "auto" prefers another backend to it for such calls; empty if it does not."""
    return hopper.slower(spec, kind) if name == "hopper" else ""


def reasons_against(
    name: str, spec: Spec, kind: CapabilityKey, call: Call | None = None
) -> list[str]:
    """Why a backend cannot run such calls; empty if it can. A backend is checked before its first
    use on a card; meanwhile the kernels of `call` are compiled. Over a cache it runs a kernel that
    is not its own, and is not checked."""
    reasons = get(name).reasons_against(spec, kind)
    if not reasons and name in _CHECKED and not kind.cache:
        if call is not None and not is_compiling() and type(call.q) is torch.Tensor:
            _check(name, kind.device, partial(_compile_ahead, name, spec, call))
        wrong = _wrong(name, kind.device.type, kind.device.index)
        return [wrong] if wrong else []
    return reasons


def unchecked(device: torch.device) -> bool:
    """Whether a backend will be checked at a call on a card."""
    return device.type == "cuda" and any(
        not first_use.is_settled(_checked(name), device) and _runs_on(name, device)
        for name in _CHECKED
    )


@lru_cache
def _runs_on(name: str, device: torch.device) -> bool:
    return not get(name).unavailable(device.type, device.index)  # type: ignore[attr-defined]


def _check(name: str, device: torch.device, meanwhile: Callable[[], None] | None = None) -> str:
    return first_use.why_not(_checked(name), _BACKENDS["reference"], device, meanwhile)


def _checked(name: str) -> first_use.Checked:
    return get(name)  # type: ignore[return-value]


@torch.no_grad()
def _compile_ahead(name: str, spec: Spec, call: Call) -> None:
    _checked(name).compile_ahead(replace(spec, backend=name), call)


def _wrong(name: str, device: str, index: int | None) -> str:
    return _check(name, torch.device(device, index))  # type: ignore[arg-type]


constant_under_compile(_wrong)


def _refusal(name: str, call: Call | None, refusals: list[str]) -> str:
    shown = ", ".join(
        f"{n} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
        for n, t in zip("qkv", [] if call is None else call[:3], strict=False)
    )
    listed = "".join(f"\n  - {r}" for r in refusals)
    return f"backend={name!r} cannot run this call ({shown}):{listed}"


def table() -> list[Available]:
    """Every backend, and whether this machine can run it."""
    no_hopper, no_triton = _why_on_no_gpu(hopper), _why_on_no_gpu(triton)
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


def _why_on_no_gpu(backend: ModuleType) -> str:
    """Why a backend runs on no GPU of this machine; empty if it runs on one."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return (
            "PyTorch sees no GPU"
            if built
            else "this PyTorch is built for the CPU only: https://pytorch.org has builds for GPUs"
        )
    reasons = [_why_not_on(backend, n) for n in range(torch.cuda.device_count())]
    return "" if "" in reasons else reasons[0]


def _why_not_on(backend: ModuleType, index: int) -> str:
    why = backend.unavailable("cuda", index)
    return _wrong(backend.name, "cuda", index) if not why and backend.name in _CHECKED else why
