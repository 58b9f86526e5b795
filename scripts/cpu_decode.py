"""One query a row over many keys on a CPU: F.sdpa's time over Headway's, medians of rounds in turns.

OMP_NUM_THREADS=2 python scripts/cpu_decode.py     # the table of docs/lab/cpu.md: half a minute
"""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

import headway as hw
from headway.inference import attention

PAGE, ROUNDS = 64, 15
SIZES = ((4, 16, 16, 64, 2048), (8, 32, 8, 128, 2048), (4, 16, 2, 64, 4096), (8, 32, 8, 128, 4096))


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of every call."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(ROUNDS + 1):  # the first one warms up
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if n:
                taken[name].append(time.perf_counter() - start)
    return {name: median(all_taken) for name, all_taken in taken.items()}


def calls_of(
    b: int, hq: int, hk: int, d: int, length: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """F.sdpa, and the calls beside it."""
    q = torch.randn(b, hq, 1, d).to(dtype)
    k, v = (torch.randn(b, hk, length, d).to(dtype) for _ in "kv")
    full = torch.full((b,), length, dtype=torch.int32)
    ragged = torch.linspace(length // 8, length, b).int()
    table = torch.randperm(b * length // PAGE).view(b, -1).int()
    pages = [
        x.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)
    ]  # fmt: skip
    at = (table.long()[:, None] * hk + torch.arange(hk)[:, None]).flatten()

    def gathered() -> torch.Tensor:
        own = [x.flatten(0, 1).flatten(1).index_select(0, at).view(b, hk, length, d) for x in pages]
        return F.scaled_dot_product_attention(q, *own, enable_gqa=True)

    causal, capped = hw.causal(), hw.softcap(30.0)
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "causal(n)": lambda: hw.attention(q, k, v, mask=hw.causal(length - 1)),
        "cache": lambda: attention(q, k, v, lengths=full),
        "cache, causal": lambda: attention(q, k, v, mask=causal, lengths=full),
        "ragged": lambda: attention(q, k, v, mask=causal, lengths=ragged),
        "pages": lambda: attention(q, *pages, lengths=full, page_table=table),
        "softcap": lambda: attention(q, k, v, capped, lengths=full),
        "sdpa on gathered pages": gathered,
    }


def main() -> None:
    """Print a line per size."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        for size in SIZES:
            with torch.inference_mode():
                taken = medians(calls_of(*size, dtype))
            sdpa = taken.pop("sdpa")
            ratios = ", ".join(f"{name} {sdpa / seconds:.2f}" for name, seconds in taken.items())
            b, hq, hk, d, length = size
            print(
                f"{b} x {hq}/{hk}, {d}, {length}, {str(dtype)[6:]}: sdpa {sdpa * 1e3:.2f} ms; {ratios}"
            )


if __name__ == "__main__":
    main()
