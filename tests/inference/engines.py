"""Stand-ins of what serving engines hand over: caches in their layouts, and metadata of a step with
prefill, decode and padded requests, in buffers whose addresses stay."""

import random
from typing import Any

import torch
from torch import Tensor

import headway as hw
from headway import inference

REQUESTS, TOKENS, MOST = 5, 40, 60  # of a step, and the most tokens that a request has
HQ, HK, D = 4, 2, 16


class Engine:
    """Requests with a history in the cache, and a step of new tokens for each."""

    page: int
    no_page, first_page = -1, 0  # an entry of the table that names no page; the first that may
    k_cache: Tensor  # (pages, hk, page, d)
    v_cache: Tensor

    def __init__(self, device: str, dtype: torch.dtype, window: int | None = None) -> None:
        zeros = lambda *shape, dtype=torch.int32: torch.zeros(shape, dtype=dtype, device=device)
        self.dtype, self.window = dtype, window
        self.q, self.output = zeros(TOKENS, HQ, D, dtype=dtype), zeros(TOKENS, HQ * D, dtype=dtype)
        self.k, self.v = (zeros(TOKENS, HK, D, dtype=dtype) for _ in range(2))
        self.cu_q, self.lengths = zeros(REQUESTS + 1), zeros(REQUESTS)
        self.slots = zeros(TOKENS, dtype=torch.int64)
        self.table = zeros(REQUESTS, -(-MOST // self.page))
        self.histories: list[tuple[Tensor, Tensor]] = []
        self.zeros = zeros

    def page_table(self) -> Tensor:
        return self.table

    def step(self, mask: Any, score: Any = None, **options: Any) -> Tensor:
        """What a layer of a backend does: write, attend, and leave the output in its buffer."""
        k_cache, v_cache = self.k_cache, self.v_cache
        inference.write(self.k, self.v, k_cache, v_cache, self.slots)
        out = self.output.unflatten(1, (HQ, D)).transpose(0, 1)[None]
        inference.attention(
            self.q.transpose(0, 1)[None], k_cache, v_cache, score, mask, lengths=self.lengths,
            page_table=self.page_table(), cu_q=self.cu_q, max_q=TOKENS, out=out, **options,
        )  # fmt: skip
        return self.output

    def draw(self, seed: int) -> None:
        """Put another step into the buffers, and its history into the cache. Nobody reads what is
        anywhere else: it is NaN."""
        numbers, g = random.Random(seed), torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(shape, generator=g).to(self.dtype)
        for x in (self.k_cache, self.v_cache, self.q, self.k, self.v):
            x.fill_(torch.nan)
        for x in (self.k_cache, self.v_cache):
            x[: self.first_page] = 7.0
        live = numbers.randint(1, REQUESTS - 1)  # the others are padding
        counts = [numbers.choice([1, 1, 3, 8]) for _ in range(live)]
        pages = list(range(self.first_page, self.k_cache.shape[0]))
        numbers.shuffle(pages)
        lengths, slots, ends = [], [], [0]
        table = torch.full(self.table.shape, self.no_page, dtype=torch.int32)
        self.histories = []
        for n, count in enumerate(counts):
            length = numbers.randint(count, MOST)
            k, v, q = normal(length, HK, D), normal(length, HK, D), normal(count, HQ, D)
            new = slice(ends[-1], ends[-1] + count)
            first_seen = 0 if self.window is None else max(0, length - count - self.window + 1)
            for page in range(-(-length // self.page)):
                if (page + 1) * self.page > first_seen:  # the pages before were freed
                    table[n, page] = pages.pop()
            places = [
                int(table[n, j // self.page]) * self.page + j % self.page for j in range(length)
            ]
            for j in range(first_seen // self.page * self.page, length - count):
                page, at = divmod(places[j], self.page)
                for cache, x in ((self.k_cache, k), (self.v_cache, v)):
                    cache[page, :, at] = x[j].to(cache.device)
            for buffer, x in ((self.q, q), (self.k, k[-count:]), (self.v, v[-count:])):
                buffer[new] = x.to(buffer.device)
            slots += places[-count:]
            ends.append(ends[-1] + count)
            lengths.append(length)
            self.histories.append((k.double(), v.double()))
        padding = REQUESTS - live
        self.lengths.copy_(torch.tensor(lengths + [0] * padding))
        self.cu_q.copy_(torch.tensor(ends + [ends[-1]] * padding))
        self.slots.copy_(torch.tensor(slots + [-1] * (TOKENS - len(slots))))
        self.put_table(table)

    def put_table(self, table: Tensor) -> None:
        self.table.copy_(table)

    def expected(self) -> Tensor:
        """Return the output by the definition, causal and in the window, in float64."""
        out, q = torch.zeros(TOKENS, HQ * D, dtype=torch.float64), self.q.double().cpu()
        ends = self.cu_q.tolist()
        for (k, v), first, last in zip(self.histories, ends, ends[1:], strict=False):
            k, v = (x.repeat_interleave(HQ // HK, 1).transpose(0, 1) for x in (k, v))
            distance = torch.arange(len(k[0]) - (last - first), len(k[0]))[:, None]
            distance = distance - torch.arange(len(k[0]))
            keep = (distance >= 0) & (distance < (self.window or MOST))
            s = q[first:last].transpose(0, 1) @ k.mT / D**0.5
            p = s.masked_fill(~keep, -torch.inf).softmax(-1)
            out[first:last] = (p @ v).transpose(0, 1).flatten(1)
        return out


class Vllm(Engine):
    """vLLM: keys and values in one tensor, (2, blocks, block, hk, d), as its flash backends have
    them, and a block table of each request."""

    page = 4

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        blocks = REQUESTS * self.table.shape[1] + 1
        self.kv_cache = self.zeros(2, blocks, self.page, HK, D, dtype=self.dtype)
        self.k_cache, self.v_cache = self.kv_cache.transpose(2, 3)


class VllmNullBlock(Vllm):
    """vLLM with keys beside values, (blocks, 2, block, hk, d); block 0, of numbers of no request,
    stands for blocks that a window has left."""

    no_page, first_page = 0, 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kv_cache = self.kv_cache.transpose(0, 1).contiguous()
        self.k_cache, self.v_cache = self.kv_cache.transpose(2, 3).unbind(1)


class Sglang(Engine):
    """SGLang: a pool of tokens, (tokens, hk, d), and a table of the places of every request's
    tokens, of which a step names rows."""

    page = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        pool = [self.zeros(REQUESTS * MOST, HK, D, dtype=self.dtype) for _ in range(2)]
        self.k_cache, self.v_cache = (x[:, :, None] for x in pool)
        self.req_to_token = self.zeros(3 * REQUESTS, MOST)
        self.req_pool_indices = self.zeros(REQUESTS, dtype=torch.int64)

    def page_table(self) -> Tensor:
        return self.req_to_token[self.req_pool_indices]

    def put_table(self, table: Tensor) -> None:
        rows = torch.randperm(len(self.req_to_token))[:REQUESTS].to(self.req_pool_indices.device)
        self.req_pool_indices.copy_(rows)
        self.req_to_token[rows] = table.to(rows.device)


ENGINES: dict[str, type[Engine]] = {
    "vLLM": Vllm, "vLLM, a null block": VllmNullBlock, "SGLang": Sglang
}  # fmt: skip
WINDOWS = {"whole": (hw.causal(), None), "window": (hw.causal() & hw.sliding_window(9), 9)}
