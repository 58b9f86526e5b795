"""A case of the table with its batch rows packed: as `varlen_attention`, or as nested tensors."""

import torch
from torch import Tensor

import headway as hw
from cases import Case, Problem, problem
from checks import compare, gradients

FORMS = ("varlen", "jagged")


def wrong(case: Case, dtype: torch.dtype, backend: str, form: str, **options: bool) -> list[str]:
    """What is wrong with the results of a case in this form."""
    return compare(case, dtype, run(problem(case, dtype), backend, form), True, **options)


def run(given: Problem, backend: str, form: str) -> dict[str, Tensor]:
    """The library's results by name, in the shapes of a batch."""
    c = given.case
    cu_q, cu_k = (torch.arange(c.b + 1) * n for n in (c.q_len, c.kv_len))
    alike = c.q_len == c.kv_len
    options = {"scale": c.scale, "sink": given.sink, "backend": backend}
    if form == "varlen":
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (given.q, given.k, given.v))
        out, lse, largest = hw.varlen_attention_with_stats(
            q, k, v, given.score(), given.mask(), cu_q=cu_q.int(), max_q=c.q_len,
            cu_k=None if alike else cu_k.int(), max_k=c.kv_len, **options,
        )  # fmt: skip
        out = out.unflatten(0, (c.b, c.q_len)).transpose(1, 2)
        lse = lse.unflatten(1, (c.b, c.q_len)).transpose(0, 1)
        of_rows = [largest]
    else:
        cu_k = cu_q if alike else cu_k
        out, lse, largest = hw.attention_with_stats(
            jagged(given.q, cu_q), jagged(given.k, cu_k), jagged(given.v, cu_k), given.score(),
            given.mask(), **options,
        )  # fmt: skip
        out = out.values().unflatten(1, (c.b, c.q_len)).transpose(0, 1)
        lse = lse.values().unflatten(1, (c.b, c.q_len)).transpose(0, 1)
        of_rows = list(largest)
    if form == "varlen":  # the largest of all rows: each row that has it is judged by it
        alone = hw.attention_with_stats(
            *(x.detach() for x in (given.q, given.k, given.v)), given.score(), given.mask(),
            scale=c.scale, backend="reference",
        ).max_logit  # fmt: skip
        of_rows = [torch.where(row == alone.amax(0), largest, row) for row in alone]
    grads = gradients(given, out, lse)
    values = {"out": out, "lse": lse, "max_logit": torch.stack(of_rows)}
    return {name: x.detach() for name, x in values.items()} | grads


def jagged(x: Tensor, offsets: Tensor) -> Tensor:
    """Return rows `(b, heads, length, width)` as a nested tensor with these offsets."""
    values = x.transpose(0, 1).flatten(1, 2)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
