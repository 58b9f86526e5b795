"""What inference is held against: every row by itself, over keys gathered from its pages, by the
definition in float64."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway import autograd
from headway.resolve import prepare
from headway.types import Coords


class Caches(NamedTuple):
    """Rows of different lengths in pages, with NaN wherever a row's own keys do not lie."""

    q: Tensor
    k: Tensor  # pages
    v: Tensor
    lengths: Tensor
    page_table: Tensor
    keys: list[Tensor]  # of every row, (1, hk, length, d)
    values: list[Tensor]

    @property
    def options(self) -> dict[str, Any]:
        return {"lengths": self.lengths, "page_table": self.page_table}

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """The same keys and values as a cache without pages."""
        capacity = self.page_table.shape[1] * self.k.shape[2]
        whole = [
            torch.full((len(self.keys), self.k.shape[1], capacity, x.shape[3]), torch.nan)
            for x in (self.k, self.v)
        ]
        for n, of_row in enumerate(zip(self.keys, self.values, strict=True)):
            for x, own in zip(whole, of_row, strict=True):
                x[n, :, : own.shape[2]] = own[0]
        return whole[0].to(self.k.dtype), whole[1].to(self.v.dtype)


def caches(
    lengths: list[int], hq: int, hk: int, *, q_len: int = 1, d: int = 16, dv: int | None = None,
    page: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Caches:  # fmt: skip
    """Random rows; which page is whose is random, too."""
    dv, g = d if dv is None else dv, torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=g)
    table = torch.full((len(lengths), max(*counts, 1) + 1), -1, dtype=torch.int32)
    k, v = (torch.full((len(order), hk, page, n), torch.nan) for n in (d, dv))
    keys, values = [], []
    for row, length in enumerate(lengths):
        own = order[sum(counts[:row]) : sum(counts[: row + 1])]
        table[row, : counts[row]] = own
        keys.append(torch.randn(1, hk, length, d, generator=g).to(dtype))
        values.append(torch.randn(1, hk, length, dv, generator=g).to(dtype))
        for j in range(length):
            k[own[j // page], :, j % page] = keys[-1][0, :, j]
            v[own[j // page], :, j % page] = values[-1][0, :, j]
    q = torch.randn(len(lengths), hq, q_len, d, generator=g).to(dtype) * 2
    return Caches(q, k.to(dtype), v.to(dtype), torch.tensor(lengths, dtype=torch.int32), table,
                  keys, values)  # fmt: skip


def by_rows(c: Caches, score: Any = None, mask: Any = None, **options: Any) -> Any:
    """out, lse and max_logit of every row, by the definition: `headway.attention` of queries at the
    row's last positions."""
    results = []
    for row, length in enumerate(c.lengths.tolist()):
        at = torch.arange(length - c.q.shape[2], length)
        coords = Coords(b=row, q_pos=at)
        spec, call = prepare(
            c.q[row : row + 1].double(), c.keys[row].double(), c.values[row].double(), score, mask,
            backend="reference", keys=coords, max_logit=True, **options,
        )  # fmt: skip
        results.append(autograd.attention(spec, call))
    return [torch.cat(x) for x in list(zip(*results, strict=True))[:3]]


def paged(k: Tensor, v: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """A cache without pages as one with, in a random order, and its page table."""
    b, hk, length, _ = k.shape
    count = -(-length // page)
    table = torch.randperm(b * count, generator=torch.Generator().manual_seed(b)).view(b, count)
    whole = []
    for x in (k, v):
        room = torch.full((b, hk, count * page, x.shape[3]), torch.nan, dtype=x.dtype)
        room[:, :, :length] = x.detach()
        pages = room.unflatten(2, (count, page)).transpose(1, 2).flatten(0, 1)
        whole.append(torch.empty_like(pages).index_copy_(0, table.flatten(), pages))
    return whole[0], whole[1], table.int()
