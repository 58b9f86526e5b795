"""The plots of docs/performance.md, from the committed results alone."""

import results
from svg import BLUE, GREEN, ORANGE, PURPLE, bars

COLOURS = {
    "Headway": BLUE,
    "FlexAttention": ORANGE,
    "cuDNN": GREEN,
    "FlashAttention-4": PURPLE,
    "PyTorch's SDPA": GREEN,
    "create_block_mask": ORANGE,
}
GPU = {
    "8k-128-causal": "causal, 128 wide",
    "8k-64-causal": "causal, 64 wide",
    "8k-192-128-causal": "MLA, causal",
    "gqa-8k-128-causal": "causal, grouped",
    "softcap-causal": "causal, softcap",
    "alibi-causal": "causal, ALiBi",
    "relative-bias-learned-causal": "causal, learned bias",
    "window-1024": "window of 1,024",
    "documents-causal": "twelve documents",
    "short-512-128-causal": "64 lines of 512",
}
CPU = {
    "causal-4k-64": "causal",
    "full-4k-64": "no mask",
    "window-512-4k-64": "window of 512",
    "packed-256-4k-64": "documents of 256",
    "prefix-4k-64": "prefix of 1,024",
    "softcap-4k-64": "causal, softcap",
    "alibi-4k-64": "causal, ALiBi",
}
MASKS = {
    "block-mask-causal-16k": "causal",
    "block-mask-window-16k": "window of 4,096",
    "block-mask-causal-documents-16k": "causal documents",
    "block-mask-window-documents-prefix-16k": "all three",
}


def pictures() -> dict[str, str]:
    gpu = ("headway", "flex", "cudnn", "flash-attention-4")
    cpu = ("headway", "sdpa", "flex")
    return {
        "pictures/speed-gpu-forward.svg": rates(GPU, "forward", "H100", gpu),
        "pictures/speed-gpu-backward.svg": rates(GPU, "backward", "H100", gpu),
        "pictures/speed-cpu-forward.svg": times(CPU, "forward", cpu),
        "pictures/speed-cpu-backward.svg": times(CPU, "backward", cpu),
    }


def rates(cases: dict[str, str], direction: str, device: str, who: tuple[str, ...]) -> str:
    """TFLOP/s of kept pairs: longer is faster."""
    groups = []
    for case, words in cases.items():
        found = results.case(case, direction, device)
        rows = [(results.NAMES[w], float(found[w]["gflops"]) / 1000) for w in who if w in found]
        groups.append((words, [(name, rate, f"{rate:.0f}") for name, rate in rows]))
    colours = {results.NAMES[w]: COLOURS[results.NAMES[w]] for w in who}
    title = f"Speed of attention, {direction}, on an {device}, by what is computed"
    return bars(groups, colours, title, f"{direction}, TFLOP/s of kept pairs: longer is faster")


def times(cases: dict[str, str], direction: str, who: tuple[str, ...]) -> str:
    """Milliseconds: shorter is faster."""
    groups = []
    for case, words in cases.items():
        found = results.case(case, direction, "Intel")
        rows = [(results.NAMES[w], float(found[w]["median"])) for w in who if w in found]
        groups.append((words, [(name, ms, f"{ms:.0f}") for name, ms in rows]))
    shown = {name for _, group in groups for name, _, _ in group}
    colours = {name: colour for name, colour in COLOURS.items() if name in shown}
    title = f"Time of attention, {direction}, on a CPU, by what is computed"
    return bars(groups, colours, title, f"{direction}, milliseconds: shorter is faster")


def block_masks() -> str:
    """A table of how long it takes to find the tiles of a mask."""
    lines = ["| 16,384 × 16,384 | Headway | PyTorch's `create_block_mask` |", "| --- | --- | --- |"]
    for case, words in MASKS.items():
        found = results.case(case, "build", "Intel", "block mask")
        ours, theirs = (float(found[who]["median"]) for who in ("headway", "create_block_mask"))
        lines.append(f"| {words} | {ours:.1f} ms | {theirs:,.0f} ms |")
    return "\n".join(lines)


def said() -> dict[str, str]:
    """What docs/performance.md says between its marks, by their names."""
    return {
        "gpu": _made_by("8k-128-causal", "H100", "time", "forward"),
        "cpu": _made_by("causal-4k-64", "Intel", "time", "forward"),
        "block-masks": block_masks(),
    }


def _made_by(case: str, device: str, measure: str, direction: str) -> str:
    row = results.case(case, direction, device, measure)["headway"]
    sizes = f"{row['b']} × {row['hq']} heads × {int(row['length']):,} × {row['d']}"
    return (
        f"{row['device']}, {row['date'][:10]}, commit `{row['commit'].removesuffix('-dirty')}`, "
        f"PyTorch {row['torch']}, {row['dtype']}. The first case is {sizes}; `headway bench --list` "
        "has the sizes of the others."
    )
