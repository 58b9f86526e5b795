"""The table of a layout's pieces, and what the exchange between ranks reads of a layout."""

import hashlib

import torch
from torch import Tensor

from ..errors import ArgumentError

NO_MESH = (
    'the layout was made from (rank, ranks) and has no mesh yet; give it one: layout.on(mesh["cp"])'
)


class ShardTable:
    """The attributes of a `Layout` that its exchanges read.

    - `table`: int64 `(pieces, 3)` on the CPU: rank, start, stop, sorted by rank and start.
    - `local`: how many tokens this rank holds; `positions`: of these, on the mesh's device.
    - `group_name`: of the process group; empty until a mesh is known.
    """

    length: int
    rank: int
    ranks: int
    local: int
    table: Tensor
    positions: Tensor
    group_name: str


def merge_pieces(table: Tensor) -> Tensor:
    """Sort pieces by rank and start, and merge those that touch."""
    table = table[table[:, 1].sort(stable=True).indices]
    table = table[table[:, 0].sort(stable=True).indices]
    if len(table) < 2:
        return table
    separate = (table[1:, 0] != table[:-1, 0]) | (table[1:, 1] != table[:-1, 2])
    true = separate.new_ones(1)
    first, last = torch.cat([true, separate]), torch.cat([separate, true])
    return torch.cat([table[first][:, :2], table[last][:, 2:]], 1)


def table_digest(table: Tensor, *numbers: int) -> int:
    """Return a number of 63 bits that no other table of pieces has."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8)
    digest.update(table.numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def check_size(x: Tensor, dim: int, size: int, holder: str) -> None:
    """Check that x has `size` tokens along `dim`, as `holder` has."""
    if x.shape[dim] != size:
        raise ArgumentError(
            f"x {tuple(x.shape)} has {x.shape[dim]} along dim={dim}, but {holder} has {size} "
            "tokens; name the dimension of the sequence by dim="
        )
