"""Random writes to slots, next to a loop over tokens."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.backends.slots import write_slots
from headway.types import FLOAT8, acc_dtype

DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
WIDTHS = (8, 8), (6, 5), (16, 1), (40, 24), (1, 0)
ODD = 0.0, -0.0, torch.nan, torch.inf, -torch.inf


def wrong_write(
    seed: int, dtypes: Sequence[torch.dtype] = DTYPES, device: str = "cpu", most: int = 50
) -> str:
    """Write random tokens to random slots; all tensors are views of larger memory.

    Return what is wrong; empty if every number in the memory of both caches is right.
    """
    random.seed(seed)
    torch.manual_seed(seed)
    pages, hk, page = random.randint(1, 5), random.randint(1, 3), random.choice([1, 3, 4, 16])
    tokens = random.choice([0, 1, 2, 7, most])
    slots = random_slots(tokens, pages * page).to(device)
    made = []
    for width in random.choice(WIDTHS):
        _, new = in_memory((tokens, hk, width), random.choice([*dtypes, *dtypes, *FLOAT8]), device)
        numbers = torch.randn(new.shape).double() * 10.0 ** random.randint(-6, 6)
        for place in random.sample(range(numbers.numel()), min(5, numbers.numel())):
            numbers.view(-1)[place] = random.choice(ODD)
        new.copy_(numbers.to(new.dtype))
        cache_dtype = random.choice([*dtypes, *FLOAT8, new.dtype])
        whole, cache = in_memory((pages, hk, page, width), cache_dtype, device)
        made.append((new, cache, random_scale(hk, device), whole))
    (k, k_cache, k_scale, _), (v, v_cache, v_scale, _) = made
    expected = [looped(*of, slots) for of in made]
    write_slots(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    for name, (new, cache, scale, whole), right in zip("kv", made, expected, strict=True):
        is_off = bits(whole) != bits(right)
        is_off &= ~(whole.double().isnan() & right.double().isnan())
        if is_off.any():
            return (
                f"{name} {tuple(new.shape)} {new.dtype} in {tuple(cache.shape)} {cache.dtype}, "
                f"scale {scale}: {whole.double()[is_off][:3]}, not {right.double()[is_off][:3]}"
            )
    return ""


def wrong_float8(dtype: torch.dtype, device: str = "cpu") -> str:
    """Write every float16 number to a cache of float8, and return what is wrong."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(torch.float16)
    new = numbers.view(-1, 1, 64)
    cache = torch.zeros(len(new), 1, 1, 64, device=device).to(dtype)
    slots = torch.arange(len(new), device=device)
    write_slots(new, new, cache, cache.clone(), slots, None, None)
    largest = torch.finfo(dtype).max
    expected = numbers.float().clamp(-largest, largest).to(dtype)
    is_off = (bits(cache.view(-1)) != bits(expected)) & ~numbers.isnan()
    is_off |= cache.view(-1).double().isnan() != numbers.isnan()
    return f"{numbers[is_off][:5]} became {cache.view(-1)[is_off][:5]}" if is_off.any() else ""


def looped(
    new: Tensor, cache: Tensor, scale: Tensor | None, whole: Tensor, slots: Tensor
) -> Tensor:
    """Return the memory of a cache after its tokens are written one by one."""
    whole, page = whole.clone(), cache.shape[2]
    written = whole.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    for x, slot in zip(new, slots.tolist(), strict=True):
        if not 0 <= slot < cache.shape[0] * page:
            continue
        acc = acc_dtype(x.dtype)
        if scale is not None:
            x = x.to(acc) / scale.to(acc).reshape(-1, 1)
        if cache.dtype in FLOAT8 and x.dtype != cache.dtype:
            largest = torch.finfo(cache.dtype).max
            x = x.to(acc).clamp(-largest, largest)
        written[slot // page, :, slot % page].copy_(x.to(cache.dtype))
    return whole


def in_memory(shape: Sequence[int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Return memory, and a view of it of this shape, with dimensions in any order."""
    order = random.sample(range(len(shape)), len(shape))
    sizes = [shape[dim] + random.randint(0, 2) for dim in order]
    whole = torch.full(sizes, 3.0, device=device).to(dtype)
    view = whole
    for n, dim in enumerate(order):
        view = view.narrow(n, random.randint(0, sizes[n] - shape[dim]), shape[dim])
    return whole, view.permute([order.index(dim) for dim in range(len(shape))])


def random_slots(tokens: int, count: int) -> Tensor:
    """Return slots, none twice, among them some that no cache has."""
    slots = torch.randperm(max(tokens, count))[:tokens]
    outside = torch.tensor([-1, -2, -(2**31), count, count + 1, 2**31 - 1])
    slots = torch.where(torch.rand(tokens) < 0.7, slots, outside[torch.randint(6, (tokens,))])
    slots = slots.to(random.choice([torch.int32, torch.int64]))
    return random.choice([slots, torch.stack([slots, torch.zeros_like(slots)], 1)[:, 0]])


def random_scale(hk: int, device: str) -> Tensor | None:
    scale = random.choice([None, torch.rand(()), torch.rand(hk), torch.rand(hk, 2)[:, 0]])
    if scale is None:
        return None
    return (scale + 0.1).to(random.choice([torch.float32, torch.float64])).to(device)


def bits(x: Tensor) -> Tensor:
    """Return numbers as integers."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
