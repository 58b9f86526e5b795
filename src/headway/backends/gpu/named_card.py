"""A card that is named and need not be there: kernels are compiled for it, and none is launched."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

from ...errors import ArgumentError


class Card(NamedTuple):
    """What kernels and their plans depend on.

    - `shared`: bytes of shared memory that a CTA may have; `processors`: multiprocessors.
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
_now: list[Card] = []
_one = Lock()


def card_of(name: str) -> Card:
    """The card of a name: "sm_90"; "sm_90:114" has as many multiprocessors.

    **Raises:** `ArgumentError` for a name that is not known.
    """
    found = re.fullmatch(r"(sm_\d+)(?::(\d+))?", name) if isinstance(name, str) else None
    if found is None or found[1] not in CARDS or found[2] == "0":
        raise ArgumentError(
            f"device={name!r} is no card that is known: {', '.join(CARDS)}; a number of "
            "multiprocessors may follow, as in 'sm_90:114' for an H100 PCIe"
        )
    card = CARDS[found[1]]
    return card if found[2] is None else card._replace(processors=int(found[2]))


def named_card() -> Card | None:
    """The card for which kernels are being compiled on tensors of the CPU; None: that of the
    tensors."""
    return _now[-1] if _now else None


class _Driver:
    """As much of Triton's driver as compiling needs."""

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
    """Inside, the kernels of calls on the CPU are those for a card. No thread may launch any."""
    from triton.runtime import driver

    from .runtime import call_plan

    with _one:
        before = driver._active
        driver.set_active(_Driver(card))  # type: ignore[arg-type]
        _now.append(card)
        call_plan.clear()
        try:
            yield
        finally:
            call_plan.clear()
            _now.pop()
            driver._active = before
