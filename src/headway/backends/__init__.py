"""The table of backends, and the choice among them."""

from typing import NamedTuple

from ..errors import ArgumentError, BackendRefused
from ..types import Spec
from . import cpu, reference, triton
from .base import Backend, Call

# In order of preference; "auto" takes the first that has nothing against the call.
_BACKENDS: dict[str, Backend] = {
    "cpu": cpu,  # type: ignore[dict-item]
    "triton": triton,  # type: ignore[dict-item]
    "reference": reference,  # type: ignore[dict-item]
}
NAMES = tuple(_BACKENDS)


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


def choose(name: str, spec: Spec, call: Call) -> str:
    """The backend to run: the one named, if it can; with "auto" the first that can.

    **Raises:** `BackendRefused` with every reason of every backend asked.
    """
    names = NAMES if name == "auto" else (name,)
    refusals = []
    for candidate in names:
        reasons = get(candidate).reasons_against(spec, call)
        if not reasons:
            return candidate
        refusals += [f"{candidate}: {reason}" for reason in reasons]
    raise BackendRefused(_refusal(name, call, refusals))


def _refusal(name: str, call: Call, refusals: list[str]) -> str:
    shown = ", ".join(
        f"{n} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
        for n, t in zip("qkv", call[:3], strict=True)
    )
    listed = "".join(f"\n  - {r}" for r in refusals)
    return f"backend={name!r} cannot run this call ({shown}):{listed}"


def table() -> list[Available]:
    """Every backend, and whether this machine can run it."""
    why_not = triton.why_not_here()
    return [
        Available("cpu", True, "the default where tensors are on the CPU"),
        Available(
            "triton", not why_not, why_not or "the default where tensors are on a GPU; any score, "
            "any mask"
        ),
        Available("reference", True, "the definition in float64; slow, any device"),
    ]  # fmt: skip
