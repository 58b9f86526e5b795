"""Exact sums (device/exact_sums.py): the host's side. With `deterministic=True` kernels add the
gradients of captured tensors to them, in any order, and the results have the same bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import BackendRefused
from .device.exact_sums import GROUP, round_sums
from .runtime.launcher import KernelLauncher

LIMIT = 256 << 20  # bytes of the sums of a call
_BLOCK = 512  # sums that a program rounds
_WIDTHS = 16, 8, 4, 2, 1  # exponents of a row
# How many sums of a tile of 16 x 16 pairs may go to one number, by the dependence of the index.
_OF_TILE = {"one": 1, "rows": 16, "cols": 16, "diagonals": 64, "pairs": 256}


def most_additions(dependences: Sequence[str], sizes: Sequence[int]) -> int:
    """Return how many numbers are added to an exact sum at most.

    - `dependences`: of the indices of the gathers that want a gradient; "tables": the sums of
      their distances are added, once for each batch row and head (`BiasTables`).
    - `sizes`: batch rows, heads, queries, keys.
    """
    b, heads, q_len, kv_len = sizes
    tiles, distances = -(-q_len // 16) * -(-kv_len // 16), q_len + kv_len + 256
    of = lambda kind: distances if kind == "tables" else tiles * _OF_TILE[kind]
    return b * heads * sum(map(of, dependences))


def exact_width(additions: int) -> int:
    """Return the largest WIDTH whose int64 holds this many numbers below 2^(23 + WIDTH)."""
    for width in _WIDTHS:
        if additions <= 1 << 40 - width:
            return width
    raise BackendRefused(
        f"deterministic=True: up to {additions:,} numbers are added to one gradient of a captured "
        f"tensor, and an exact sum holds {1 << 39:,}; split the call along batch or heads"
    )


class ExactSums:
    """The exact sums of a plan, where its gradients of captured tensors are deterministic.

    - `width`: WIDTH; 0: kernels add to the gradients themselves.
    - `sizes`: by number of the captured tensor, the elements of those that want a gradient.
    """

    def __init__(self, width: int, sizes: dict[int, int], device: torch.device) -> None:
        self.width, self.sizes, self.device, self.bytes = width, sizes, device, 0
        self.rows = 256 // width + 1 if width else 1
        if not width:
            return
        for size in sizes.values():
            self.reserve(size)
        self.kernels = {n: self._kernel(size) for n, size in sizes.items() if size}

    def reserve(self, size: int) -> None:
        """Count the memory of this many sums.

        **Raises:** `BackendRefused` if those of a call take more than `LIMIT`.
        """
        self.bytes += 8 * self._integers(size)
        if self.bytes > LIMIT:
            raise BackendRefused(
                "deterministic=True: the exact sums of the gradients of captured tensors take "
                f"{self.bytes:,} bytes or more, and may take {LIMIT:,}; capture smaller tensors "
                "(shared by heads, or with fewer distances), detach() them, or leave out "
                "deterministic=True (torch.use_deterministic_algorithms(True) asks for it too)"
            )

    def zeros(self, size: int) -> Tensor:
        """Return this many sums, which are 0: float32 if `width` is."""
        if not self.width:
            return torch.zeros(size, dtype=torch.float32, device=self.device)
        return torch.zeros(self._integers(size), dtype=torch.int64, device=self.device)

    def begin(self, grads: Sequence[Tensor | None]) -> list:
        """Return what kernels add to, by number of the captured tensor."""
        if not self.width:
            return list(grads)
        return [self.zeros(self.sizes[n]) if n in self.sizes else None for n in range(len(grads))]

    def write(self, sums: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> None:
        """Write the sums that `begin` returned to the gradients."""
        if self.width:
            for n, kernel in self.kernels.items():
                kernel((sums[n], grads[n]))

    def _integers(self, size: int) -> int:
        group = GROUP.value
        return max(1, -(-size // group)) * group * self.rows

    def _kernel(self, size: int) -> KernelLauncher:
        options = {"WIDTH": self.width, "BLOCK": _BLOCK}
        arrange = lambda tensors, *_: (*tensors, size)
        return KernelLauncher(round_sums, self.device, options, -(-size // _BLOCK), arrange)
