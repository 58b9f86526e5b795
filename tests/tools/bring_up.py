"""The Hopper kernels on a card, simplest first, in processes that are killed when they hang.

    python tests/tools/bring_up.py check            is each feature right? (float64 on the GPU)
    python tests/tools/bring_up.py bench            TFLOP/s against cuDNN and the Triton backend
    python tests/tools/bring_up.py check NAME ...   some of them; also `bench NAME ...`
    python tests/tools/bring_up.py table NAME ...   cases of the shared table (or `all`)
    python tests/tools/bring_up.py again            hundreds of calls: are their bits the same?

Every line is printed as soon as it is known: name, seconds, and `ok`, what is wrong, or `HANG`.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
BF16, F16 = torch.bfloat16, torch.float16
TURNS = {"deterministic": True, "exact": False}

# Name: (b, hq, hk, q_len, kv_len, d, dv), options. In the order in which they build on each other.
CHECKS = {
    "tile": ((1, 1, 1, 128, 128, 128, 128), {}),
    "two_blocks": ((1, 1, 1, 128, 256, 128, 128), {}),
    "many": ((2, 8, 8, 1024, 1024, 128, 128), {}),
    "tails": ((2, 3, 3, 333, 517, 128, 128), {}),
    "causal": ((2, 8, 8, 1024, 1024, 128, 128), {"mask": "causal"}),
    "groups": ((2, 8, 2, 777, 777, 128, 128), {"mask": "causal"}),
    "width_64": ((2, 8, 2, 777, 777, 64, 64), {"mask": "causal"}),
    "f16": ((2, 4, 4, 640, 640, 128, 128), {"mask": "causal", "dtype": F16}),
    "softcap": ((2, 8, 8, 777, 777, 128, 128), {"mask": "causal", "score": "softcap"}),
    "softcap_64": ((2, 8, 8, 777, 777, 64, 64), {"mask": "causal", "score": "softcap"}),
    "alibi": ((2, 8, 8, 777, 777, 128, 128), {"mask": "causal", "score": "alibi"}),
    # A product adds a straight line, where nobody asks for the largest logits.
    "slanted": (
        (2, 8, 4, 777, 1300, 128, 128),
        {"mask": "causal", "score": "alibi", "stats": False},
    ),
    "slanted_64": (
        (2, 8, 8, 777, 777, 64, 64),
        {"mask": "causal", "score": "alibi", "stats": False},
    ),
    "slanted_full": ((1, 3, 3, 640, 4000, 128, 128), {"score": "steep", "stats": False}),
    # A known gain multiplies dk and dq at the end.
    "steep": ((2, 8, 2, 777, 777, 64, 64), {"score": "steep", "mask": "causal"}),
    "steep_mla": ((2, 4, 4, 777, 777, 192, 128), {"score": "steep", "mask": "causal"}),
    "steep_256": ((2, 4, 4, 777, 777, 256, 256), {"score": "steep"}),
    "window": ((2, 4, 4, 2000, 2000, 128, 128), {"mask": "window"}),
    # Lengths in whole tiles: what consumers see of partial blocks is known.
    "band": ((2, 4, 4, 2048, 2048, 128, 128), {"mask": "window"}),
    "band_alibi": (
        (2, 8, 4, 1024, 2048, 128, 128),
        {"mask": "window", "score": "alibi", "stats": False},
    ),
    "band_mla": ((2, 4, 4, 2048, 2048, 192, 128), {"mask": "window", "sink": True}),
    "document": ((2, 4, 4, 2000, 2000, 128, 128), {"mask": "document"}),
    "sink": ((2, 8, 8, 777, 777, 128, 128), {"mask": "causal", "sink": True}),
    "relative": ((2, 4, 4, 777, 777, 128, 128), {"score": "relative"}),
    "relative_causal": ((2, 8, 2, 1024, 1024, 128, 128), {"score": "relative", "mask": "causal"}),
    "relative_window": ((2, 4, 4, 777, 1300, 96, 96), {"score": "relative", "mask": "window"}),
    "relative_64": ((2, 4, 4, 777, 333, 64, 64), {"score": "relative"}),
    "relative_mla": ((2, 4, 4, 777, 777, 192, 128), {"score": "relative", "mask": "causal"}),
    "relative_256": ((2, 4, 4, 777, 777, 256, 256), {"score": "relative", "mask": "causal"}),
    "buckets": ((2, 4, 4, 777, 777, 128, 128), {"score": "buckets", "mask": "causal"}),
    "width_96": ((2, 4, 4, 777, 777, 96, 96), {"mask": "causal"}),
    "width_80": ((2, 4, 4, 333, 333, 80, 72), {"mask": "causal"}),
    "mla": ((2, 4, 4, 777, 777, 192, 128), {"mask": "causal"}),
    "width_256": ((2, 4, 4, 777, 777, 256, 256), {"mask": "causal"}),
    "persistent": ((4, 16, 16, 2048, 2048, 128, 128), {"mask": "causal", "exact": False}),
    # Few ranks of many blocks: parts of ranks, joined.
    "shared": ((1, 3, 3, 640, 4000, 128, 128), {"sink": True}),
    "shared_score": ((1, 4, 2, 1000, 4100, 128, 128), {"score": "softcap"}),
    "shared_64": ((1, 5, 5, 600, 5000, 64, 64), {"sink": True}),
    "shared_mla": ((1, 3, 3, 640, 4000, 192, 128), {}),
    "shared_256": ((1, 3, 3, 640, 4000, 256, 256), {}),
    # Deterministic ones have more CTAs than run at once, and are run several times.
    "in_turn": ((4, 16, 16, 2048, 2048, 128, 128), {"mask": "causal", **TURNS}),
    "in_turn_full": ((2, 16, 4, 2048, 1999, 128, 128), TURNS),
    "in_turn_64": ((4, 16, 4, 2048, 2048, 64, 64), {"mask": "document", **TURNS}),
    "in_turn_mla": ((2, 16, 16, 2048, 2048, 192, 128), {"mask": "window", **TURNS}),
    "in_turn_256": ((2, 16, 16, 2048, 2048, 256, 256), {"mask": "causal", **TURNS}),
    # Short lines of many heads, or short documents: CTAs take whole ones.
    "whole": ((64, 16, 16, 512, 512, 128, 128), {"mask": "causal", "exact": False}),
    "whole_full": ((33, 16, 16, 250, 517, 128, 128), {"exact": False}),
    "whole_steep": ((33, 16, 16, 250, 517, 128, 128), {"score": "steep", "exact": False}),
    "whole_groups": ((33, 16, 4, 120, 333, 128, 128), {"mask": "causal", "exact": False}),
    "whole_64": ((33, 16, 16, 500, 500, 64, 64), {"mask": "document", **TURNS}),
    "whole_packed": ((1, 16, 16, 8192, 8192, 128, 128), {"mask": "packed", "exact": False}),
    "whole_packed_64": ((2, 16, 16, 4000, 4000, 64, 64), {"mask": "packed", **TURNS}),
    "whole_in_turn": ((64, 16, 16, 512, 512, 128, 128), {"mask": "causal", **TURNS}),
    # More heads than a grid has programs along its second axis.
    "many_rows": ((70_000, 1, 1, 20, 20, 64, 64), {"mask": "causal"}),
    "many_heads": ((1, 70_000, 35_000, 9, 40, 64, 64), {"score": "relative"}),
    "many_wide": ((35, 2_000, 2_000, 5, 7, 256, 256), {}),
    "first_use": (),  # the small case that every process runs first
}
# Forwards with thousands of ranks: what happens once in 10,000 is not seen in two calls.
AGAIN = {
    "document_64": ((2, 32, 32, 8192, 8192, 64, 64), {"mask": "document"}),
    "document_128": ((2, 16, 16, 8192, 8192, 128, 128), {"mask": "document"}),
    "window_64": ((2, 32, 32, 8192, 8192, 64, 64), {"mask": "window"}),
    "short_64": ((64, 16, 16, 512, 512, 64, 64), {"mask": "causal"}),
    "short_128": ((64, 16, 16, 512, 512, 128, 128), {"mask": "causal"}),
    # Three consumers; and queries in registers, without and with ranks that are shared out.
    "causal_64": ((2, 32, 32, 8192, 8192, 64, 64), {"mask": "causal"}),
    "full_128": ((16, 16, 16, 1024, 1024, 128, 128), {}),
    "shared_128": ((4, 16, 16, 4096, 4096, 128, 128), {}),
    "shared_64": ((4, 16, 16, 4096, 4096, 64, 64), {}),
    "few_128": ((1, 8, 8, 128, 65536, 128, 128), {}),
}
# The rows of DESIGN.md's table that these kernels run so far.
ROWS = {
    f"{b}x{h}x{n}x{d}{'c' if mask else ''}": ((b, h, hk, n, n, d, d), {"mask": mask})
    for (b, h, hk, n, d) in (
        (4, 16, 16, 4096, 128), (2, 16, 16, 8192, 128), (1, 16, 16, 16384, 128),
        (16, 16, 16, 1024, 128), (2, 32, 32, 8192, 64), (2, 32, 8, 8192, 128),
        (64, 16, 16, 512, 128), (128, 16, 16, 256, 64),
    )
    for mask in (None, "causal")
}  # fmt: skip
ROWS |= {
    "few_64k": ((1, 8, 8, 128, 65536, 128, 128), {}),
    "mla_8k": ((2, 16, 16, 8192, 8192, 192, 128), {}),
    "mla_8kc": ((2, 16, 16, 8192, 8192, 192, 128), {"mask": "causal"}),
    "256_16k": ((1, 8, 8, 16384, 16384, 256, 256), {}),
    "256_16kc": ((1, 8, 8, 16384, 16384, 256, 256), {"mask": "causal"}),
    "softcap_8kc": ((2, 16, 16, 8192, 8192, 128, 128), {"mask": "causal", "score": "softcap"}),
    "alibi_8kc": ((2, 16, 16, 8192, 8192, 128, 128), {"mask": "causal", "score": "alibi"}),
    "window_8k": ((2, 16, 16, 8192, 8192, 128, 128), {"mask": "window"}),
    "document_8k": ((2, 16, 16, 8192, 8192, 128, 128), {"mask": "document"}),
    "relative_8k": ((2, 16, 16, 8192, 8192, 128, 128), {"score": "relative"}),
    "relative_8kc": ((2, 16, 16, 8192, 8192, 128, 128), {"score": "relative", "mask": "causal"}),
    "in_turn_1kc": ((16, 16, 16, 1024, 1024, 128, 128), {"mask": "causal", **TURNS}),
    "in_turn_8k": ((2, 16, 16, 8192, 8192, 128, 128), TURNS),
    "in_turn_8kc": ((2, 16, 16, 8192, 8192, 128, 128), {"mask": "causal", **TURNS}),
    "in_turn_window": ((2, 16, 16, 8192, 8192, 128, 128), {"mask": "window", **TURNS}),
    "in_turn_64": ((2, 32, 32, 8192, 8192, 64, 64), {"mask": "causal", **TURNS}),
    "in_turn_256": ((1, 8, 8, 16384, 16384, 256, 256), {"mask": "causal", **TURNS}),
}


def made(shape, mask=None, score=None, dtype=BF16, sink=False, backward=True, **others):
    """q, k, v, dout, and the score, mask and sink of a call, with gradients where wanted."""
    import headway as hw

    b, hq, hk, n, m, d, dv = shape
    torch.manual_seed(0)
    level = torch.arange(b * hq, device="cuda").view(b, hq, 1, 1) % 7 - 3.0
    q = (torch.randn(b, hq, n, d, device="cuda") + level * d**-0.25).to(dtype)
    k = (torch.randn(b, hk, m, d, device="cuda") + d**-0.25).to(dtype)
    v = torch.randn(b, hk, m, dv, device="cuda").to(dtype)
    dout = torch.randn(b, hq, n, dv, device="cuda").to(dtype)
    learned = {"relative": (hq, 2 * max(n, m) - 1), "buckets": (32, hq)}.get(score)
    table = None if learned is None else torch.randn(learned, device="cuda").requires_grad_()
    scores = {None: None, "softcap": hw.softcap(30.0),
              "alibi": hw.alibi(2.0 ** -torch.arange(1, hq + 1, device="cuda").float()),
              "steep": lambda s, b, h, i, j: 1.1 * s + 0.01 * (j - i)}  # fmt: skip
    if table is not None:
        scores[score] = (hw.relative_bias if score == "relative" else hw.t5_bias)(table)
    leaves = [x.requires_grad_(backward) for x in (q, k, v)]
    sinks = torch.randn(hq, device="cuda").requires_grad_(backward) if sink else None
    return leaves, dout, scores[score], mask_of(mask, shape, "cuda"), sinks, table


def mask_of(name, shape, device):
    """The mask of a call."""
    import headway as hw

    b, _, _, n, m, *_ = shape
    if name is None:
        return None
    if name == "document":
        ids = (torch.arange(m, device=device) * 7 // m).expand(b, m).contiguous()
        return hw.causal() & hw.document(ids)
    if name == "packed":
        return hw.causal() & hw.document(torch.arange(m, device=device) // 256)
    return hw.causal() & hw.sliding_window(min(1024, n // 4)) if name == "window" else hw.causal()


def call(name, leaves, dout, score, mask, sink, table, deterministic=False, stats=True):
    """out, its statistics unless nobody asks for them, and gradients by a backend."""
    import headway as hw

    attend = hw.attention_with_stats if stats else hw.attention
    got = attend(*leaves, score, mask, sink=sink, backend=name, deterministic=deterministic)
    if stats:
        found = {"out": got.out, "lse": got.lse, "max_logit": got.max_logit}
        made, given = (got.out, got.lse), (dout, torch.cos(got.lse.detach()))
    else:
        found = {"out": got}
        made, given = (got,), (dout,)
    if leaves[0].requires_grad:
        wrt = [x for x in (*leaves, sink, table) if x is not None]
        grads = torch.autograd.grad(made, wrt, given)
        found |= dict(zip(("dq", "dk", "dv", "dsink or dtable"), grads, strict=False))
    return {n: x.detach() for n, x in found.items()}


def check(name: str) -> str:
    """`ok`, or what is wrong. Poisoned memory, and twice, so that a race has a chance to show."""
    if name == "first_use":
        from headway.backends import first_use, hopper, reference

        return first_use.failure_reason(hopper, reference, torch.device("cuda", 0)) or "ok"
    shape, options = CHECKS[name]
    inputs = made(shape, **options)
    other = "reference" if options.get("exact", True) else "triton"
    stats = options.get("stats", True)
    right = call(other, *inputs, stats=stats)
    wrong, first = [], {}
    in_turn = options.get("deterministic", False)
    for turn in range(8 if in_turn else 2):
        torch.full((4 * inputs[0][0].numel() + 2**22,), float("nan"), device="cuda")
        got = call("hopper", *inputs, deterministic=in_turn, stats=stats)
        torch.cuda.synchronize()
        first = first or got
        wrong += [f"{key} differs" for key in got if in_turn and not got[key].equal(first[key])]
        for key, x in right.items():
            off = (got[key].double() - x.double()).norm() / x.double().norm()
            limit = 1e-3 if key in ("lse", "max_logit") else 1e-2
            if not off <= limit:
                wrong.append(f"{key} {off.item():.1e}{' again' * turn}")
    return ", ".join(wrong) or "ok"


def again(name: str, times: int = 500) -> str:
    """`ok`, or how many of so many forwards differ from the first one."""
    import headway as hw

    shape, options = AGAIN[name]
    leaves, _, score, mask, _, _ = made(shape, backward=False, **options)
    forward = lambda: hw.attention(*leaves, score, mask, backend="hopper")
    with torch.no_grad():
        first = forward()
        differ = sum(not forward().equal(first) for _ in range(times))
    return f"{differ} of {times} differ" if differ else "ok"


def bench(name: str) -> str:
    """Medians of three turns of TFLOP/s over live pairs, forward / backward, of each contestant."""
    from statistics import median

    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    from triton.testing import do_bench

    import headway as hw

    shape, options = ROWS[name]
    leaves, dout, score, mask, _, _ = made(shape, **options)
    b, hq, hk, n, m, d, dv = shape
    live = n * m
    if mask is not None:
        reach = {"window": 1024, "document": n / 14}.get(options["mask"], n / 2)
        live = n * min(reach, n / 2)
    flops = 2 * b * hq * live * (d + dv)
    back = 2 * b * hq * live * (3 * d + 2 * dv)
    in_turn = options.get("deterministic", False)
    calls = {x: (lambda x=x: hw.attention(*leaves, score, mask, deterministic=in_turn, backend=x))
             for x in ("hopper", "triton")}  # fmt: skip
    if score is None and options.get("mask") in (None, "causal"):

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return sdpa(*leaves, is_causal=mask is not None, enable_gqa=hq != hk)

        calls["cudnn"] = cudnn  # fmt: skip
    speeds: dict[str, list] = {}
    outs = {x: f() for x, f in calls.items()}
    for _ in range(3):
        for x, f in calls.items():
            with torch.no_grad():
                t = do_bench(f, warmup=10, rep=40, return_mode="median")
            speeds.setdefault(f"{x} forward", []).append(flops / t / 1e9)
            if options.get("backward", True):
                f = lambda x=x: torch.autograd.grad(outs[x], leaves, dout, retain_graph=True)
                t = do_bench(f, warmup=10, rep=40, return_mode="median")
                speeds.setdefault(f"{x} backward", []).append(back / t / 1e9)
    return ", ".join(f"{x} {median(t):.0f}" for x, t in speeds.items())


def table(name: str) -> str:
    """A case of the shared table, as `tests/checks.py` judges it."""
    from cases import BY_NAME, problem
    from checks import compare, run
    from headway.errors import BackendRefused
    from tools.on_gpu import moved

    try:
        got = run(moved(problem(BY_NAME[name], BF16), "cuda"), "hopper", True)
    except BackendRefused:
        return "refused"
    got = {key: x.cpu() for key, x in got.items()}
    return "; ".join(compare(BY_NAME[name], BF16, got, True)) or "ok"


RUN = {"check": check, "bench": bench, "table": table, "again": again}


def child(what: str, names: list[str]) -> None:
    """Run some, in this process."""
    from headway import backends

    with mock.patch.object(
        backends, "_SELF_TESTED", ()
    ):  # to see what is wrong, not that something is
        for name in names:
            start = time.perf_counter()
            print(f"start {name}", flush=True)
            try:
                said = RUN[what](name)
            except Exception as error:  # noqa: BLE001  (every kind of failure is a result here)
                said = f"{type(error).__name__}: {str(error)[:600]}"
            print(f"{name:24} {time.perf_counter() - start:6.1f} s  {said}", flush=True)
            if "CUDA error" in said or "misaligned" in said:
                sys.exit(f"{name} broke this process's context")


def watched(what: str, names: list[str], patience: float) -> list[str]:
    """The lines of a child that runs these; it is killed `patience` seconds after its last line."""
    left, lines = list(names), []
    while left:
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", what, *left], stdout=subprocess.PIPE, text=True
        )
        timer, current = time.monotonic(), None
        import selectors

        waiting = selectors.DefaultSelector()
        waiting.register(process.stdout, selectors.EVENT_READ)
        while True:
            if waiting.select(timeout=1):
                line = process.stdout.readline()
                if not line:
                    break
                timer = time.monotonic()
                if line.startswith("start "):
                    current = line.split()[1]
                elif current and line.startswith(current):
                    print(line, end="", flush=True)
                    lines.append(line)
                    left.remove(current)
                    current = None
            elif time.monotonic() - timer > patience:
                process.kill()
                break
        process.wait()
        if current is not None:  # it hung there, or took the process with it
            line = f"{current:24} {'HANG' if process.returncode == -9 else 'CRASH'}\n"
            print(line, end="", flush=True)
            lines.append(line)
            left.remove(current)
        elif left and process.returncode:
            lines.append(f"{left[0]:24} CRASH before it started\n")
            print(lines[-1], end="", flush=True)
            left.pop(0)
    return lines


def main(what: str, names: list[str]) -> None:
    if what == "table":
        from cases import CASES

        names = [c.name for c in CASES] if names == ["all"] else names
    names = names or list({"check": CHECKS, "bench": ROWS, "again": AGAIN}[what])
    if what == "bench":  # alone on the card
        watched(what, names, 60)
        return
    first, rest = (names[:3], names[3:]) if what == "check" else ([], names)
    watched(what, first, 40)
    several = 6
    with ThreadPoolExecutor(several) as pool:
        list(pool.map(lambda n: watched(what, rest[n::several], 60), range(several)))


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(sys.argv[2], sys.argv[3:])
    else:
        main(sys.argv[1], sys.argv[2:])
