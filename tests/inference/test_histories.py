"""Random calls of a cache, right and wrong ones, next to a model of lists: what is right gives what
the model says, what is wrong is refused by name and changes nothing."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headway as hw
from headway import inference
from headway.errors import ArgumentError, CacheFull
from headway.inference import Cache, PagedCache

HK, D, PAGE = 1, 4, 3


class Model:
    """Rows are lists of keys and values, those of every layer; pages are objects, which rows may
    share. `due` says which layers append next."""

    def __init__(self, layers: int, rows: int, page: int, pages: int, most: int) -> None:
        self.page, self.pages, self.most = page, pages, most
        self.lengths = [0] * rows
        self.written = [[[] for _ in range(rows)] for _ in range(layers)]
        self.due = [False] * layers
        self.held = [[] for _ in range(rows)]
        self.in_use = [False] * rows

    def owed(self, layer: int, row: int) -> int:
        return self.lengths[row] - len(self.written[layer][row])

    def waiting(self, row: int) -> int:
        return max(self.owed(layer, row) for layer in range(len(self.due)))

    def in_step(self) -> bool:
        """Some layers have appended, others have tokens to append."""
        owed = any(self.waiting(row) for row in range(len(self.lengths)))
        return owed and any(self.due) and not all(self.due)

    def reserve(self, counts: dict[int, int]) -> None:
        if self.in_step():
            raise ArgumentError
        held = [list(own) for own in self.held]
        for row, count in counts.items():
            at, end = self.lengths[row], self.lengths[row] + count
            if end > self.most:
                raise CacheFull
            if count and at % self.page:
                last = held[row][at // self.page]
                if sum(last in own for own in held) > 1:
                    held[row][at // self.page] = object()
            held[row] += [object() for _ in range(-(-end // self.page) - len(held[row]))]
        if len({id(page) for own in held for page in own}) > self.pages:
            raise CacheFull
        self.held = held
        for row, count in counts.items():
            self.lengths[row] += count
            self.in_use[row] |= count > 0
        self.due = [True] * len(self.due)

    def append(self, layer: int, k: list[Tensor], v: list[Tensor]) -> None:
        """k and v by row, (hk, tokens, d)."""
        short = any(self.owed(layer, row) > x.shape[1] for row, x in enumerate(k))
        if not self.due[layer] or short:
            raise ArgumentError
        for row, (x, y) in enumerate(zip(k, v, strict=True)):
            n = self.owed(layer, row)
            self.written[layer][row] += [
                (x[:, x.shape[1] - n + i], y[:, y.shape[1] - n + i]) for i in range(n)
            ]
        self.due[layer] = False

    def options(self, layer: int) -> None:
        if self.due[layer] and any(self.owed(layer, row) for row in range(len(self.lengths))):
            raise ArgumentError

    def truncate(self, row: int, length: int) -> None:
        stays = min(len(of_layer[row]) for of_layer in self.written) < length < self.lengths[row]
        if length > self.lengths[row] or (stays and self.in_step()):
            raise ArgumentError
        self._cut(row, length)

    def free(self, rows: list[int]) -> None:
        for row in rows:
            self._cut(row, 0)
            self.in_use[row] = False

    def fork(self, row: int) -> int:
        others = [n for n, used in enumerate(self.in_use) if not used and n != row]
        if not others:
            raise CacheFull
        if self.waiting(row):
            raise ArgumentError
        new = others[0]
        self.in_use[row] = self.in_use[new] = True
        self.held[new], self.lengths[new] = list(self.held[row]), self.lengths[row]
        for of_layer in self.written:
            of_layer[new] = list(of_layer[row])
        return new

    def _cut(self, row: int, length: int) -> None:
        self.lengths[row] = length
        del self.held[row][-(-length // self.page) :]
        for of_layer in self.written:
            del of_layer[row][length:]


class History:
    """A cache and its model, and calls of both."""

    def __init__(self, seed: str) -> None:
        self.draw = draw = random.Random(seed)
        self.layers, self.rows = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4])
        self.paged = draw.random() < 0.6
        options = {"dtype": torch.float64}
        if self.paged:
            pages, most = draw.randint(2, 9), draw.choice([3, 9])
            self.cache = PagedCache(
                self.layers, pages, PAGE, HK, D, rows=self.rows, max_pages=most, **options
            )
            self.model = Model(self.layers, self.rows, PAGE, pages, PAGE * most)
        else:
            room, most = draw.randint(1, 6), draw.choice([None, 6, 9])
            self.cache = Cache(
                self.layers, self.rows, HK, D, capacity=room, max_capacity=most, **options
            )
            self.model = Model(self.layers, self.rows, 1, 10**6, most or 10**6)
        for x in self.cache.stored:  # what others left there
            x.fill_(777.0)

    def both(self, call: Any, of_model: Any) -> Any:
        """The same of both, or an error of the same kind that changes nothing."""
        before = self.state()
        try:
            wanted = of_model()
        except (ArgumentError, CacheFull) as error:
            with pytest.raises(type(error), match=r"reserve|append|options|cu_q|truncate|fork|row"):
                call()
            for x, y in zip(before, self.state(), strict=True):
                assert x == y if not isinstance(x, Tensor) else torch.equal(x, y)
            return None
        got = call()
        assert got == wanted or wanted is None
        assert self.cache.row_lengths == self.model.lengths == self.cache.lengths.tolist()
        if self.paged:
            held = {id(page) for own in self.model.held for page in own}
            assert self.cache.free_pages == self.model.pages - len(held)
        return wanted

    def state(self) -> list[Any]:
        cache, step = self.cache, self.cache.step
        seen = [x.clone() for x in (*cache.stored, cache.lengths, cache.written)]
        if self.paged:
            seen += [cache.page_table.clone(), cache.free_pages, list(cache._in_use)]
        due = [turn.due for turn in step.turns]
        return [*seen, list(cache.row_lengths), list(step.tokens), step.most, step.total, due]

    def step(self) -> None:
        calls = [self.reserve, self.append, self.attend, self.truncate, self.free, self.wrong]
        weights = [4, 12 if any(self.model.due) else 1, 2, 1, 1, 1]
        if self.paged:
            calls, weights = [*calls, self.fork], [*weights, 2]
        self.draw.choices(calls, weights)[0]()

    def reserve(self) -> None:
        draw = self.draw
        rows = draw.sample(range(self.rows), draw.randint(0, self.rows))
        counts = [draw.choice([0, 1, 1, 1, 2, 4]) for _ in rows]
        given = rows, counts
        if rows and draw.random() < 0.3:
            rows, counts = rows[:1], counts[:1]
            given = draw.choice([(rows[0], counts[0]), (np.int64(rows[0]), np.int32(counts[0]))])
        self.both(
            lambda: self.cache.reserve(*given),
            lambda: self.model.reserve(dict(zip(rows, counts, strict=True))),
        )

    def append(self) -> None:
        """As many as are owed, mostly, in a layer that is due."""
        draw, model = self.draw, self.model
        due = [n for n, is_due in enumerate(model.due) if is_due]
        layer = draw.choice(due) if due and draw.random() < 0.9 else draw.randrange(self.layers)
        owed = [model.owed(layer, row) for row in range(self.rows)]
        if draw.random() < 0.5:
            tokens = max(0, max(owed) + draw.choice([0, 0, 0, 0, 1, -1]))
            k, v = torch.randn(2, self.rows, HK, tokens, D, dtype=torch.float64)
            ends, parts = None, (list(k), list(v))
        else:
            counts = [max(0, n + draw.choice([0] * 12 + [1, -1])) for n in owed]
            k, v = torch.randn(
                2, 1, HK, sum(counts) + draw.choice([0, 2, 40]), D, dtype=torch.float64
            )
            ends = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
            parts = [x[0, :, : sum(counts)].split(counts, 1) for x in (k, v)]
        self.both(
            lambda: self.cache[layer].append(k, v, cu_q=ends), lambda: model.append(layer, *parts)
        )

    def attend(self) -> None:
        layer, seen = self.draw.randrange(self.layers), []
        self.both(lambda: seen.append(self.cache[layer].options), lambda: self.model.options(layer))
        if not seen:
            return
        q = torch.randn(self.rows, HK, 1, D, dtype=torch.float64)
        out = inference.attention(q, *self.cache[layer].kv, mask=hw.causal(), **seen[0])
        for row, tokens in enumerate(self.model.written[layer]):
            if not tokens:
                assert not out[row].any()
                continue
            k, v = (torch.stack(x, 1) for x in zip(*tokens, strict=True))
            p = (q[row] @ k.mT / math.sqrt(D)).softmax(-1)
            torch.testing.assert_close(out[row], p @ v, atol=1e-12, rtol=1e-12)

    def truncate(self) -> None:
        row = self.draw.randrange(self.rows)
        length = max(0, self.model.lengths[row] - self.draw.choice([0, 1, 2, -1]))
        self.both(
            lambda: self.cache.truncate(row, length), lambda: self.model.truncate(row, length)
        )

    def free(self) -> None:
        rows = self.draw.sample(range(self.rows), self.draw.randint(1, min(2, self.rows)))
        given = rows[0] if len(rows) == 1 else rows
        call = self.cache.free if self.paged else self.cache.clear
        self.both(lambda: call(given), lambda: self.model.free(rows))

    def fork(self) -> None:
        row = self.draw.randrange(self.rows)
        self.both(lambda: self.cache.fork(row), lambda: self.model.fork(row))

    def wrong(self) -> None:
        """What no state allows."""
        cache, rows = self.cache, self.rows
        free = cache.free if self.paged else cache.clear
        k = torch.randn(rows, HK, 40, D)
        packed, ends = k[:1], torch.zeros(rows + 1, dtype=torch.int32)
        calls = [
            lambda: cache.reserve(rows, 1),
            lambda: cache.reserve(-1, 1),
            lambda: cache.reserve(0, -1),
            lambda: cache.reserve(0, 1.0),
            lambda: cache.reserve(0.0, 1),
            lambda: cache.reserve([0, 0], 1),
            lambda: cache.reserve([0], [1, 1]),
            lambda: cache.reserve([0], torch.tensor([1])),
            lambda: cache.truncate(rows, 0),
            lambda: cache.truncate(-1, 0),
            lambda: cache.truncate(0, -1),
            lambda: free(rows),
            lambda: free([0, -1]),
            lambda: cache[0].append(k),
            lambda: cache[0].append(k[..., 1:], k),
            lambda: cache[0].append(k, k[:, :, 1:]),
            lambda: cache[0].append(k.int(), k.int()),
            lambda: cache[0].append(torch.cat((k, k)), torch.cat((k, k))),
            lambda: cache[0].append(packed, packed, cu_q=ends[1:]),
            lambda: cache[0].append(packed, packed, cu_q=ends.float()),
            lambda: cache[0].append(packed, packed, cu_q=ends + 41),
        ]
        if self.paged:
            calls += [lambda: cache.fork(rows), lambda: cache.fork(-1)]
        before = self.state()
        with pytest.raises(ArgumentError, match=r"reserve|append|truncate|row|cu_q|must be"):
            self.draw.choice(calls)()
        for x, y in zip(before, self.state(), strict=True):
            assert x == y if not isinstance(x, Tensor) else torch.equal(x, y)


@pytest.mark.parametrize("hundred", range(10))
def test_a_hundred_histories(hundred):
    with torch.inference_mode():
        for n in range(100):
            history = History(f"{hundred}, {n}")
            torch.manual_seed(100 * hundred + n)
            for _ in range(14):
                history.step()
            history.attend()
