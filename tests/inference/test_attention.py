"""Attention over caches equals attention over each row's own keys."""

import pytest
import torch
from tests.inference.gather import by_rows, caches
from torch import Tensor

import headway as hw
from headway import inference
from headway.errors import ArgumentError

BACKENDS = ["reference"]
LENGTHS = [0, 1, 7, 8, 9, 40]


def close(result: tuple, wanted: list[Tensor], tolerance: float = 2e-5) -> None:
    for x, y in zip(result, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("group", "hk"), [(1, 2), (5, 1), (7, 2), (8, 1)])
def test_rows_of_any_length_in_pages_and_without(backend, group, hk):
    c = caches(LENGTHS, group * hk, hk, dv=12)
    score = hw.alibi(group * hk) >> hw.softcap(20.0)
    wanted = by_rows(c, score, hw.causal())
    paged = inference.attention_with_stats(
        c.q, c.k, c.v, score, hw.causal(), backend=backend, **c.options
    )
    close(paged, wanted)
    plain = inference.attention_with_stats(
        c.q, *c.contiguous(), score, hw.causal(), lengths=c.lengths, backend=backend
    )
    for x, y in zip(plain, paged, strict=True):
        assert torch.equal(x, y)


def test_wrong_arguments_are_named():
    c = caches([3, 9], 4, 2)
    with pytest.raises(ArgumentError, match=r"lengths must be an int32 tensor \(b,\) with b = 2"):
        inference.attention(c.q, c.k, c.v, lengths=c.lengths.long(), page_table=c.page_table)
    with pytest.raises(ArgumentError, match="page_table must be an int32 tensor"):
        inference.attention(c.q, c.k, c.v, lengths=c.lengths, page_table=c.page_table.long())
    with pytest.raises(ArgumentError, match="cu_q needs max_q"):
        inference.attention(c.q, c.k, c.v, cu_q=c.lengths, **c.options)
    with pytest.raises(ArgumentError, match="global positions"):
        inference.attention(c.q, c.k, c.v, None, hw.causal(8), **c.options)
    with torch.inference_mode(False), pytest.raises(ArgumentError, match="q requires grad"):
        inference.attention(torch.randn(2, 4, 1, 16, requires_grad=True), c.k, c.v, **c.options)
