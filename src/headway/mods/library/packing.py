"""Convert lengths, or cumulative lengths, of packed documents to the document of every position."""

from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...types import as_int

Ends = Tensor | list[Tensor]  # where each document ends; for a batch, row by row


def document_ids(
    ends: Ends, kv_ends: Ends | None, q_len: int | None, kv_len: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the document of every query, and of every key where these differ."""
    if kv_ends is None and kv_len not in (None, q_len):
        kv_ends = ends
    if kv_ends is not None and _documents(ends) != _documents(kv_ends):
        raise ArgumentError(
            f"document: queries are {_documents(ends)} documents, keys {_documents(kv_ends)}; each "
            "document needs a length of both, which may be 0"
        )
    ids = _ids_of(ends, "q_len", q_len)
    kv_ids = ids if kv_ends is None else _ids_of(kv_ends, "kv_len", kv_len)
    if kv_ends is None and bool((ids >= 0).all()):
        return ids, None
    return ids, torch.where(kv_ids < 0, -2, kv_ids)  # so that padded queries do not see padded keys


def _documents(ends: Ends) -> int | list[int]:
    return [len(row) for row in ends] if isinstance(ends, list) else len(ends)


def _ids_of(ends: Ends, name: str, length: int | None) -> Tensor:
    """Return the document of every position, int32; -1 past the last."""
    rows = ends if isinstance(ends, list) else [ends]
    longest = max(int(row[-1]) if len(row) else 0 for row in rows)
    argument, length = length, as_int(length)
    if argument is not None and length is None:
        raise ArgumentError(f"document: {name}={argument!r} must be an integer")
    if length is not None and length < longest:
        raise ArgumentError(f"document: {name}={length}, but the documents have {longest} tokens")
    position = torch.arange(longest if length is None else length, device=rows[0].device)
    ids = [torch.searchsorted(row, position, right=True) for row in rows]
    ids = [torch.where(n == len(row), -1, n) for n, row in zip(ids, rows, strict=True)]
    return (torch.stack(ids) if isinstance(ends, list) else ids[0]).to(torch.int32)


def ends_of(name: str, value: Any, device: torch.device | str | None, cumulative: bool) -> Ends:
    """Check lengths or cumulative lengths, and convert them to ends, int64."""
    if isinstance(value, Tensor):
        batch = value.dim() == 2
    else:
        value = list(value)
        batch = any(isinstance(row, list | tuple) or getattr(row, "ndim", 0) for row in value)
    if batch:
        if not len(value):
            raise ArgumentError(f"document: {name} has no rows")
        return [_row_ends(f"{name}[{n}]", row, device, cumulative) for n, row in enumerate(value)]
    return _row_ends(name, value, device, cumulative)


def _row_ends(name: str, value: Any, device: torch.device | str | None, cumulative: bool) -> Tensor:
    try:
        row = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"document: {name} must be integers, got {value!r}") from error
    row = row.long() if row.numel() == 0 else row
    if row.dim() != 1 or row.dtype.is_floating_point or row.dtype == torch.bool:
        raise ArgumentError(
            f"document: {name} must be a list of integers or a 1-d int tensor, "
            f"got {row.dtype} of shape {tuple(row.shape)}"
        )
    if cumulative and (not len(row) or int(row[0])):
        raise ArgumentError(f"document: {name} must start with 0, got {row[:4].tolist()}")
    lengths = torch.diff(row) if cumulative else row
    if bool((lengths < 0).any()):
        index = int((lengths < 0).nonzero()[0])
        problem = "falls" if cumulative else "is negative"
        excerpt = row[max(index - 3, 0) : index + 3].tolist()
        raise ArgumentError(
            f"document: {name} {problem} at index {index + cumulative}: ...{excerpt}..."
        )
    return lengths.long().cumsum(0)
