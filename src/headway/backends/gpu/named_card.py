"""A GPU that is named and need not be there: kernels are compiled for it, none is launched."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

from ...errors import ArgumentError


class Card(NamedTuple):
    """A GPU, by the properties that kernels and their plans depend on.

    - `shared`: bytes of shared memory that a CTA may have.
    - `processors`: the number of multiprocessors.
    """

    name: str
    capability: tuple[int, int]
    shared: int
    processors: int


CARDS = {
    card.name: card
    for card in (
        Card("sm_80", (8, 0), 163 << 10, 108),  # A100
        Card("sm_86", (8, 6), 99 << 10, 84),  # A10, A40, RTX 3090
        Card("sm_89", (8, 9), 99 << 10, 142),  # L4, L40, RTX 4090
        Card("sm_90", (9, 0), 227 << 10, 132),  # H100, H200, GH200
        Card("sm_100", (10, 0), 227 << 10, 148),  # B200, GB200
        Card("sm_120", (12, 0), 99 << 10, 170),  # RTX 5090
    )
}
_named: list[Card] = []  # the one that is being compiled for, or none
_lock = Lock()  # one at a time


def card_of(name: str) -> Card:
    """Return the GPU of a name, such as "sm_90"; "sm_90:114" has 114 multiprocessors.

    **Raises:** `ArgumentError` for an unknown name.
    """
    match = re.fullmatch(r"(sm_\d+)(?::(\d+))?", name) if isinstance(name, str) else None
    if match is None or match[1] not in CARDS or match[2] == "0":
        raise ArgumentError(
            f"device={name!r} is not a known GPU: use one of {', '.join(CARDS)}; a number of "
            "multiprocessors may follow, as in 'sm_90:114' for an H100 PCIe"
        )
    card = CARDS[match[1]]
    return card if match[2] is None else card._replace(processors=int(match[2]))


def named_card() -> Card | None:
    """Return the GPU that kernels are compiled for on tensors of the CPU, or None."""
    return _named[-1] if _named else None


class _CompileOnlyDriver:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, card: Card) -> None:
        self.card = card

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self.card.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> str:
        return f"named {self.card.name}"  # Triton keeps the kernels of each device by themselves

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling_for(card: Card) -> Iterator[None]:
    """Compile the kernels of calls on the CPU for a GPU. No thread may launch any meanwhile."""
    from triton.runtime import driver

    from .runtime import call_plan

    with _lock:
        outer_driver = driver._active
        driver.set_active(_CompileOnlyDriver(card))  # type: ignore[arg-type]
        _named.append(card)
        call_plan.clear()
        try:
            yield
        finally:
            call_plan.clear()
            _named.pop()
            driver._active = outer_driver
