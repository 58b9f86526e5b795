"""Queries and keys in any order, and their positions given one by one."""

import torch
from torch import Tensor

from cases import Case, problem
from checks import gradients
from headway import autograd
from headway.resolve import prepare
from headway.types import Coords


def scattered(
    case: Case, dtype: torch.dtype, backend: str, per_batch: bool = False, tile: int = 1,
    **options: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """The results of a case by name, with statistics, put back in order: the same as of the case.

    With `per_batch` the order is another one in every row of the batch; in tiles of 128 the kernels
    are told so.
    """
    given, generator = problem(case, dtype), torch.Generator().manual_seed(0)
    rows = case.b if per_batch else 1
    q_pos, kv_pos = (
        torch.stack([_order(n, tile, generator) for _ in range(rows)])
        for n in (case.q_len, case.kv_len)
    )

    def ordered(x: Tensor, pos: Tensor) -> Tensor:
        pos = pos.expand(case.b, -1).view(case.b, 1, -1, *[1] * (x.dim() - 3))
        return x.take_along_dim(pos, 2)

    spec, call = prepare(
        ordered(given.q, q_pos), ordered(given.k, kv_pos), ordered(given.v, kv_pos),
        given.score(), given.mask(), scale=case.scale, sink=given.sink, dropout=case.dropout,
        seed=given.seed if case.dropout else None, backend=backend, max_logit=True,
        keys=Coords(
            q_pos=q_pos if per_batch else q_pos[0], kv_pos=kv_pos if per_batch else kv_pos[0],
            straight_below=max(case.q_len, case.kv_len) * (tile == 128),
        ), **options,
    )  # fmt: skip
    out, lse, max_logit, *_ = autograd.attention(spec, call)
    out, lse = (ordered(x, q_pos.argsort(-1)) for x in (out, lse))
    made = {"out": out, "lse": lse, "max_logit": max_logit}
    return {n: x.detach() for n, x in made.items()} | gradients(given, out, lse)


def _order(length: int, tile: int, generator: torch.Generator) -> Tensor:
    """Whole tiles in any order; what is less than one stays last."""
    whole, rest = divmod(length, tile)
    first = torch.randperm(whole, generator=generator) * tile
    tail = torch.arange(length - rest, length)
    return torch.cat([(first[:, None] + torch.arange(tile)).flatten(), tail])
