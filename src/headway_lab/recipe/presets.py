"""Runs by name: the settings of the long runs that docs/training.md shows.

The text is that of all installed packages. Bytes are read once: steps times batch times context is
100 million for the large model, 20 million for the small one.
"""

from typing import Any

from headway.errors import ArgumentError

from .config import TrainConfig

_ON_A_GPU: dict[str, Any] = {
    "text": "packages",
    "device": "cuda",
    "dtype": "bfloat16",
    "mask": "causal",
    "eval_every": 400,
    "save_every": 100_000,  # the first step and the last
    "sample_bytes": 0,
}
_LARGE: dict[str, Any] = _ON_A_GPU | {
    "depth": 8, "width": 768, "heads": 6, "context": 4096, "batch": 16, "steps": 1526,
    "embedding_lr": 0.02, "head_lr": 0.003,
}  # fmt: skip

PRESETS = {
    # 57 million weights, heads of 128.
    "60m": TrainConfig(**_LARGE, kv_heads=6),
    # The same model with three key heads, and what makes its logits explode: no QK-norm, no weight
    # decay, and Muon at seven times its learning rate.
    "60m-explode": TrainConfig(**_LARGE, lr=0.1, weight_decay=0.0),
    # 19 million weights, heads of 64.
    "19m": TrainConfig(
        **_ON_A_GPU, depth=6, width=512, heads=8, kv_heads=8, context=2048, batch=16, steps=610,
        embedding_lr=0.03, head_lr=0.005,
    ),
}  # fmt: skip


def preset(name: str) -> TrainConfig:
    """Return the settings of that name. Raises ArgumentError with the names there are."""
    if name not in PRESETS:
        raise ArgumentError(f"--preset {name!r}: there are {', '.join(PRESETS)}")
    return PRESETS[name]
