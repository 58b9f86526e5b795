"""Pages that an engine has freed: entries of the page table that no query of the row reads."""

import pytest
import torch

import headway as hw
from headway import inference
from headway.errors import ArgumentError

from .gather import by_rows, caches

WINDOW = hw.causal() & hw.sliding_window(10)
MASKS = {
    "window": WINDOW,
    "window and sinks": WINDOW | (hw.causal() & hw.prefix(3)),
    "function": lambda b, h, i, j: (i >= j) & (i - j < 4 + 2 * h) & ((j % 40) * 3 >= 8),
    "of nothing": lambda b, h, i, j: j < 0,
}


def without(c, mask, hq: int, q_len: int, missing: int):
    """The caches with `missing` at every page of which no query of the row sees a key, and NaN
    there; and how many these are."""
    table, k, page, count = c.page_table.clone(), c.k.clone(), c.k.shape[2], 0
    for row, length in enumerate(c.lengths.tolist()):
        i, h = torch.arange(length - q_len, length)[:, None, None], torch.arange(hq)[:, None]
        for n in range(-(-length // page)):
            j = torch.arange(n * page, min(length, (n + 1) * page))
            if not mask(torch.tensor(row), h, i, j).any():
                k[table[row, n]] = torch.nan
                table[row, n], count = missing, count + 1
    return c._replace(k=k, page_table=table), count


@pytest.mark.parametrize("missing", [-1, 1 << 20])
@pytest.mark.parametrize("q_len", [1, 3, 20])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", MASKS)
def test_a_page_that_no_query_reads_may_be_missing(name, backend, q_len, missing):
    mask = MASKS[name]
    whole = caches([80, 23, 41], 4, 2, q_len=q_len, page=4)
    c, count = without(whole, mask, 4, q_len, missing)
    assert count > 3
    given = inference.attention_with_stats(c.q, c.k, c.v, None, mask, backend=backend, **c.options)
    for x, right in zip(given, by_rows(whole, None, mask), strict=True):
        torch.testing.assert_close(x.double(), right, atol=1e-5, rtol=1e-5)
    packed = c.q.transpose(0, 1).flatten(1, 2)[None]
    cu_q = torch.arange(4, dtype=torch.int32) * q_len
    out = inference.attention(
        packed, c.k, c.v, None, mask, backend=backend, cu_q=cu_q, max_q=q_len, **c.options
    )
    torch.testing.assert_close(out, given.out.transpose(0, 1).flatten(1, 2)[None])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_missing_page_that_a_query_reads_is_refused(backend):
    c = caches([80, 41], 4, 2, q_len=2, page=4)
    table = c.page_table.clone()
    table[0, :17] = -1  # the second last query sees keys from 69 on, which lie on page 17
    table[1, :7] = -1  # and of this row from 30 on, on page 7
    call = lambda: inference.attention(
        c.q, c.k, c.v, None, WINDOW, lengths=c.lengths, page_table=table, backend=backend
    )
    call()
    table[1, 7] = 99
    with pytest.raises(
        ArgumentError, match=r"page_table\[1, 7\] = 99 is none of .* attends to one"
    ):
        call()
    for mask in (None, hw.causal()):
        with pytest.raises(ArgumentError, match=r"page_table\[0, 0\] = -1 is none of"):
            inference.attention(c.q, c.k, c.v, None, mask, lengths=c.lengths, page_table=table)
