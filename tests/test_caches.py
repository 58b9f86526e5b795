"""What is remembered is bounded, and any number of threads may use it."""

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

import headway as hw
from headway import caches, call_cache
from headway.blocks import cached_build, clear_block_cache
from headway.blocks.build import _cache
from headway.caches import LRUCache, TensorCache
from headway.mods import lower_mod
from headway.types import Captured

THREADS = 6


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], None]) -> None:
    """Run by several threads that start together; what one of them raises is raised."""
    start = threading.Barrier(THREADS)

    def run(n: int) -> None:
        start.wait()
        work(n)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, n) for n in range(THREADS)]:
            done.result()


def test_what_was_asked_for_stays():
    cache: LRUCache[int] = LRUCache(3)
    for n in range(3):
        cache.put(n, n)
    assert cache.get(0) == 0
    for n in range(3, 20):
        cache.put(n, n)
        assert [cache.get(0), cache.get(n), len(cache)] == [0, n, 3]
    assert cache.get(5) is None


def test_what_is_new_stays_though_all_else_was_asked_for():
    cache: LRUCache[int] = LRUCache(3)
    for n in range(9):
        cache.put(n, n)
        assert [cache.get(k) for k in range(n + 1)][-1] == n
    assert len(cache) == 3 == len(cache.values())


def test_a_value_takes_the_place_of_the_one_before():
    cache: LRUCache[str] = LRUCache(2)
    cache.put(1, "a")
    cache.put(2, "b")
    assert cache.put(2, "c") == "c"
    assert [cache.get(1), cache.get(2)] == ["a", "c"]
    cache.clear()
    assert (len(cache), cache.get(1)) == (0, None)


def test_what_cannot_be_hashed_is_no_key():
    cache: LRUCache[int] = LRUCache(2)
    with pytest.raises(TypeError):
        cache.get([])
    with pytest.raises(TypeError):
        cache.put([], 1)
    assert len(cache) == 0


# -- what was made of tensors ---------------------------------------------------------------------


@pytest.fixture
def of_tensors():
    """A cache, and a look into it that counts what is made."""
    cache: TensorCache[int] = TensorCache(8)
    made = []

    def of(*tensors, key=None):
        return cache.of(tensors, key, lambda: made.append(len(made)) or len(made))

    yield cache, of
    TensorCache._all.remove(cache)


def test_what_was_made_of_tensors_is_found_until_one_is_written_to(of_tensors):
    cache, of = of_tensors
    a, b = torch.zeros(3), torch.zeros(3)
    assert [of(a, b), of(a, b), of(b, a), of(a, b, key=1), of(a, b)] == [1, 1, 2, 3, 1]
    for _ in range(20):
        b[1:].add_(1)
        first = of(a, b)
        assert of(a, b) == first > 3
    assert len(cache) == 3  # one version of each
    a.data.add_(1)
    assert of(a, b) == first
    clear_block_cache()
    assert of(a, b) == first + 1
    assert [of(), of()] == [first + 2] * 2


def test_what_was_made_of_a_tensor_goes_with_it(of_tensors):
    cache, of = of_tensors
    stays = torch.zeros(3)
    for _ in range(5):  # new tensors are likely to be given the same address
        goes = torch.zeros(3)
        assert of(stays, goes) == of(stays, goes)
        of(goes, goes)
        assert len(cache) == 2
        ref = weakref.ref(goes)
        del goes
        gc.collect()
        assert ref() is None
        assert len(cache) == 0


def test_nothing_is_known_of_tensors_whose_writes_nobody_counts(of_tensors):
    cache, of = of_tensors
    with torch.inference_mode():
        a = torch.zeros(3)
    assert [of(a), of(a), of(a, torch.zeros(3)), len(cache)] == [1, 2, 3, 0]


def test_while_a_graph_is_captured_nothing_is_found_and_nothing_kept(of_tensors):
    cache, of = of_tensors
    a = torch.zeros(3)
    of(a)
    with mock.patch.object(caches, "capturing", lambda device: device == a.device):
        assert [of(a), of(a), of(torch.zeros(3)), of()] == [2, 3, 4, 5]
        assert of() == 5  # the same whatever tensors hold
    assert [of(a), len(cache)] == [1, 2]
    host: TensorCache[int] = TensorCache(8, in_captures=True)
    TensorCache._all.remove(host)
    with mock.patch.object(caches, "capturing", return_value=True):
        assert [host.of([a], None, lambda n=n: n) for n in range(3)] == [0, 0, 0]


def test_threads_and_what_dies_meanwhile(restless):
    cache: TensorCache[int] = TensorCache(4)
    stay = [torch.tensor(n) for n in range(6)]

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(1500):
            n = order.randrange(9)
            t = stay[n] if n < 6 else torch.tensor(n)
            assert cache.of([t], None, lambda n=n: n) == n
            assert len(cache) <= 4

    try:
        at_once(work)
    finally:
        TensorCache._all.remove(cache)


class Key:
    """Compared in Python, where threads change turns, and by way of the cache itself."""

    def __init__(self, n: int, cache: LRUCache) -> None:
        self.n, self.cache = n, cache

    def __hash__(self) -> int:
        return self.n % 5

    def __eq__(self, other: object) -> bool:
        self.cache.get("another")
        return isinstance(other, Key) and self.n == other.n


def test_threads_use_one_cache(restless):
    cache: LRUCache[int] = LRUCache(16)
    cache.put(0, -1)

    def work(seed: int) -> None:
        order = random.Random(seed)
        for step in range(3000):
            n = order.randrange(40)
            found = cache.get(key := Key(n, cache))
            assert found is None or found == n
            if found is None:
                assert cache.put(key, n) == n
            if step % 500 == 499:
                cache.clear()
            assert len(cache) <= 16

    at_once(work)
    assert all(value in range(-1, 40) for value in cache.values())


def test_threads_look_for_tiles_that_are_being_forgotten(restless, monkeypatch):
    """There is room for nearly all of them, so that most looks are at what may go next."""
    monkeypatch.setattr(sys.modules["headway.blocks.build"], "build", lambda *of: of[1].ints[0])
    graph, _ = lower_mod("mask", hw.sliding_window(3), torch.float32)
    shape, tile, device = (1, 1, 8, 8), (8, 8), torch.device("cpu")
    clear_block_cache()

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(20_000):
            n = order.randrange(70)
            assert cached_build(graph, Captured([], [n], []), shape, tile, device) == n

    try:
        at_once(work)
    finally:
        clear_block_cache()


def test_threads_build_block_masks_and_attend(restless, monkeypatch):
    """Masks in random order, more of them than any cache holds: each thread gets its own result."""
    clear_block_cache()
    # What is forgotten has to be looked for at that moment: there is room for nearly all.
    monkeypatch.setattr(_cache, "capacity", 55)
    monkeypatch.setattr(call_cache._signatures, "capacity", 55)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 24, 8)
    ids = [torch.randint(0, 3, (24,)).sort().values for _ in range(20)]

    def band(n: int) -> Callable:
        return lambda b, h, i, j: (i - j).abs() <= n

    masks = [hw.sliding_window(n) for n in range(1, 21)]
    masks += [hw.causal() & hw.document(t) for t in ids]
    masks += [band(n) for n in range(20)]
    at = torch.arange(24)
    places = torch.zeros((), dtype=torch.int64), at * 0, at[:, None], at
    kept = [torch.as_tensor((at[:, None] - at).abs() < n) for n in range(1, 21)]
    kept += [(at[:, None] >= at) & (t[:, None] == t) for t in ids]
    kept += [band(n)(*places) for n in range(20)]
    right = [torch.nn.functional.scaled_dot_product_attention(q, k, v, m) for m in kept]

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(60):
            n = order.randrange(len(masks))
            made = hw.attention(q, k, v, mask=masks[n])
            torch.testing.assert_close(made, right[n], rtol=1e-5, atol=1e-5)
            tiles = hw.block_mask(masks[n], 1, 1, 24, 24, tile=(8, 8)).to_dense()[0, 0]
            blocks = kept[n].view(3, 8, 3, 8).movedim(1, 2).flatten(2)
            expected = blocks.any(-1).to(torch.uint8) + blocks.all(-1)
            assert torch.equal(tiles.to(torch.uint8), expected)

    at_once(work)
    assert len(_cache) <= 55
