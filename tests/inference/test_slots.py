"""`write`: slots of a paged cache, against a loop."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headway as hw
from headway import inference
from headway.errors import ArgumentError
from headway.types import FLOAT8

from .slot_writes import wrong_float8, wrong_write

PAGES, HK, PAGE, D, DV = 5, 2, 4, 8, 6


def caches(layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Caches in the layouts of engines, as `(pages, hk, page, width)`."""
    if layout == "pages first":  # vLLM: (pages, 2, page, hk, width)
        whole = torch.randn(PAGES, 2, PAGE, HK, D).to(dtype)
        return whole[:, 0].transpose(1, 2), whole[:, 1].transpose(1, 2)
    k, v = (torch.randn(PAGES, HK, PAGE, width).to(dtype) for width in (D, DV))
    if layout == "heads first":
        return k, v
    # SGLang: (tokens, hk, width), pages of one
    k, v = (torch.randn(PAGES * PAGE, HK, width).to(dtype) for width in (D, DV))
    return k[:, :, None], v[:, :, None]


def looped(new: Tensor, cache: Tensor, slots: list[int], scale: Tensor | None) -> Tensor:
    cache, page = cache.float(), cache.shape[2]
    for token, slot in enumerate(slots):
        if slot >= 0:
            x = new[token] if scale is None else new[token] / scale.reshape(-1, 1)
            cache[slot // page, :, slot % page] = x.float()
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FLOAT8], ids=str)
@pytest.mark.parametrize("layout", ["heads first", "pages first", "tokens"])
def test_slots(layout, dtype):
    for tokens in (0, 1, 7):
        k_cache, v_cache = caches(layout, dtype)
        k, v = (torch.randn(tokens, HK, x.shape[3]) for x in (k_cache, v_cache))
        slots = torch.randperm(PAGES * PAGE)[:tokens] - 2  # some are -1, and so skipped
        slots = slots.clamp(min=-1).int()
        scale = torch.tensor([0.5, 2.0]) if dtype in FLOAT8 else None
        right = [
            looped(x, cache, slots.tolist(), scale).to(dtype)
            for x, cache in ((k, k_cache), (v, v_cache))
        ]  # fmt: skip
        inference.write(k, v, k_cache, v_cache, slots, k_scale=scale, v_scale=scale)
        for made, expected in zip((k_cache, v_cache), right, strict=True):
            assert torch.equal(made.float(), expected.float())


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_is_clamped_to_its_range(dtype):
    cache = torch.zeros(1, 1, 4, 1).to(dtype)
    new = torch.tensor([1e6, -1e6, torch.inf, torch.nan]).view(4, 1, 1)
    inference.write(new, new, cache, cache.clone(), torch.arange(4))
    largest = torch.finfo(dtype).max
    right = torch.tensor([largest, -largest, largest, torch.nan])
    torch.testing.assert_close(cache.float().flatten(), right, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_number_as_float8(dtype):
    assert not wrong_float8(dtype)


class Mode(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext, Mode])
def test_random_writes(mode):
    """Under a mode no number is read."""
    with mode():
        assert [wrong_write(seed) for seed in range(60)] == [""] * 60


def written(k, v, whole, slots):
    """A write to two views of one tensor, and what is read after it."""
    k_cache, v_cache = whole.transpose(2, 3).unbind(1)
    inference.write(k, v, k_cache, v_cache, slots)
    return k_cache + 1, v_cache + 1


@pytest.mark.parametrize("transform", ["compile", "export", "vmap"])
def test_transformed(transform):
    slots = torch.tensor([5, -1, 19])
    k, v, whole = (
        torch.randn(4, *shape) for shape in ((3, HK, D),) * 2 + ((PAGES, 2, PAGE, HK, D),)
    )
    copy = whole.clone()
    expected = [written(k[n], v[n], whole[n], slots) for n in range(4)]
    if transform == "vmap":
        made = list(zip(*torch.vmap(written, (0, 0, 0, None))(k, v, copy, slots), strict=True))
    else:
        if transform == "compile":
            fn = torch.compile(written, fullgraph=True, backend="aot_eager")
        else:
            module = type("Module", (torch.nn.Module,), {"forward": staticmethod(written)})
            fn = torch.export.export(module(), (k[0], v[0], copy[0].clone(), slots)).module()
        made = [fn(k[n], v[n], copy[n], slots) for n in range(4)]
    assert torch.equal(copy, whole)
    for x, y in zip(made, expected, strict=True):
        assert all(map(torch.equal, x, y))


def test_a_write_is_seen_by_what_was_saved_before():
    k_cache, v_cache = caches("pages first", torch.float32)
    x = torch.ones((), requires_grad=True)
    saved = (x * k_cache).sum()
    inference.write(NEW, NEW, k_cache, v_cache, SLOTS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_tokens_that_are_all_skipped_write_nothing():
    k_cache, v_cache = caches("heads first", torch.float32)
    before = k_cache.clone(), v_cache.clone()
    new = torch.randn(3, HK, D), torch.randn(3, HK, DV)
    inference.write(*new, k_cache, v_cache, torch.full((3,), -1))
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


def test_what_was_written_is_attended_to():
    """Prefill and decode of an engine in one call: rows of 3 and 1 new tokens, and a padded one."""
    k_cache, v_cache = caches("pages first", torch.float32)
    k, v, q = torch.randn(6, HK, D), torch.randn(6, HK, D), torch.randn(6, 4, D)
    table = torch.tensor([[3, 1], [0, 2], [4, 4]], dtype=torch.int32)
    lengths, cu_q = torch.tensor([3, 6, 0]).int(), torch.tensor([0, 3, 4, 4]).int()
    slots = torch.tensor([12, 13, 14, 9, -1, -1])  # row 1 has position 5: page 2, place 1
    inference.write(k, v, k_cache, v_cache, slots)
    out = inference.attention(
        q.transpose(0, 1)[None], k_cache, v_cache, mask=hw.causal(), lengths=lengths,
        page_table=table, cu_q=cu_q, max_q=3,
    )[0].transpose(0, 1)  # fmt: skip
    first = hw.attention(*(x[:3].transpose(0, 1)[None] for x in (q, k, v)), mask=hw.causal())
    torch.testing.assert_close(out[:3], first[0].transpose(0, 1))
    keys, values = (torch.cat([x[0], x[2]], 1)[None, :, :6] for x in (k_cache, v_cache))
    assert torch.equal(keys[0, :, 5], k[3])
    second = hw.attention(q[3:4].transpose(0, 1)[None], keys, values)
    torch.testing.assert_close(out[3:4], second[0].transpose(0, 1))
    assert (out[4:] == 0).all()


def test_the_host_reads_no_slots():
    """Tensors on "meta" have no numbers to read."""
    new = torch.empty(3, HK, D, device="meta")
    cache = torch.empty(PAGES, HK, PAGE, D, device="meta")
    inference.write(new, new, cache, cache.clone(), torch.empty(3, device="meta").int())


NEW, CACHE, SLOTS = torch.randn(3, HK, D), torch.randn(PAGES, HK, PAGE, D), torch.tensor([0, 5, 9])
REFUSED = {
    "past the end": ({"slots": torch.tensor([0, 20, 1])}, "from 0 to 20, but the cache has 0 to 19"),
    "negative": ({"slots": torch.tensor([0, -2, 1])}, "from -2 to 1"),
    "floats": ({"slots": SLOTS.float()}, r"slot_mapping must be int32 or int64 \(tokens,\) = \(3,\)"),
    "too few": ({"slots": SLOTS[:2]}, r"slot_mapping must be"),
    "elsewhere": ({"slots": SLOTS.to("meta")}, "slot_mapping is on meta, k on cpu"),
    "heads": ({"k": NEW[:, :1]}, r"k has \(hk, width\) = \(1, 8\), its cache \(2, 8\)"),
    "tokens": ({"v": NEW[:2]}, "must have the same tokens"),
    "a batch": ({"k": NEW[None]}, r"k must be floats \(tokens, hk, width\)"),
    "a cache of ints": ({"k_cache": CACHE.int()}, "k_cache is torch.int32"),
    "a flat cache": ({"v_cache": CACHE[0]}, r"v_cache must be \(pages, hk, page, width\)"),
    "pages that are one": ({"k_cache": CACHE[:1].expand_as(CACHE)}, "pages share memory"),
    "of inference mode": (
        {"v_cache": torch.inference_mode()(CACHE.clone)()}, r"v_cache was made under torch\.inference"
    ),
    "a scale": ({"k_scale": torch.ones(3)}, r"k_scale must be a float tensor \(\) or \(hk,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, message = REFUSED[name]
    given = {"k": NEW, "v": NEW, "k_cache": CACHE.clone(), "v_cache": CACHE.clone(), "slots": SLOTS}
    given |= changes
    before = [x.clone() for x in (given["k_cache"], given["v_cache"])]
    with pytest.raises(ArgumentError, match=message):
        inference.write(
            given["k"], given["v"], given["k_cache"], given["v_cache"], given["slots"],
            k_scale=given.get("k_scale"),
        )  # fmt: skip
    assert all(map(torch.equal, (given["k_cache"], given["v_cache"]), before))
