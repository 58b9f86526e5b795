"""The first step of a process, timed in it: run by `first_call.py`, as a file.

It is a process as a user has it. Before the clock starts it has imported PyTorch and Headway, or
transformers, and made its tensors, or its model; nothing is imported for the bench's sake. What a
call imports counts: FlexAttention and its compiler, and what autograd takes.

Standard input: {kind, contestant, device, shape: (b, h, length, d), parts}. Standard output:
seconds, from the call until the device has done its work. `forward`; `both`, up to the end of
`loss.backward()`; and `second`, of the first call of another kind after it. Of the kind "llama":
`step`, forward, backward and optimizer. With `parts`, also what was spent where, by name, and the
seconds of every kernel by stage of the compiler.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

Shape = tuple[int, int, int, int]


def score_of(kind: str, heads: int, length: int, device: str) -> Any:
    """Return the score of a kind; the table of "bias" is trained."""
    if kind == "plain":
        return None
    if kind == "score":
        return lambda s, b, h, i, j: 1.1 * s + 0.01 * (j - i) * s.abs()
    table = torch.zeros(heads, 2 * length - 1, device=device, requires_grad=True)
    return lambda s, b, h, i, j: s + table[h, j - i + (length - 1)]


def call_of(contestant: str, score: Any, length: int, device: str) -> Callable[..., torch.Tensor]:
    """Return a causal call of a contestant."""
    if contestant != "flex":
        import headway as hw

        return lambda q, k, v: hw.attention(q, k, v, score, hw.causal(), backend=contestant)

    def run(q: Any, k: Any, v: Any) -> Any:
        from torch.nn.attention import flex_attention as flex

        blocks = flex.create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=device
        )
        compiled: Any = torch.compile(flex.flex_attention, dynamic=False)
        return compiled(q, k, v, score_mod=score, block_mask=blocks)

    return run


def llama_of(contestant: str, shape: Shape, device: str) -> Callable[[], object]:
    """Return a training step of a small Llama: forward, backward and the optimizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if contestant != "sdpa":
        from headway.integrations import transformers as integration

        integration.register()
    b, h, n, d = shape
    sizes: dict[str, Any] = {
        "vocab_size": 1024, "hidden_size": h * d, "intermediate_size": 2 * h * d,
        "num_hidden_layers": 4, "num_attention_heads": h, "num_key_value_heads": h,
        "attn_implementation": "sdpa" if contestant == "sdpa" else "headway",
    }  # fmt: skip
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**sizes))
    model.to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1024, (b, n), device=device)

    def step() -> object:
        model(tokens, labels=tokens).loss.backward()
        return optimizer.step()

    return step


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Time the first call, and one of another kind after it; or a model's first training step."""
    kind, contestant, device = (question[name] for name in ("kind", "contestant", "device"))
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    if kind == "llama":
        model_step = llama_of(contestant, question["shape"], device)
        wait()
        start = time.perf_counter()
        model_step()
        wait()
        return {"step": time.perf_counter() - start}
    b, h, n, d = question["shape"]
    q, k, v = (
        torch.randn(b, h, n, d, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    call = call_of(contestant, score_of(kind, h, n, device), n, device)
    capped = lambda s, b, h, i, j: 20.0 * (s / 20.0).tanh()
    second_call = call_of(contestant, capped, n, device)
    seconds: dict[str, Any] = {}

    def step(call: Callable[..., torch.Tensor]) -> tuple[float, float]:
        wait()
        start = time.perf_counter()
        out = call(q, k, v)
        wait()
        middle = time.perf_counter()
        out.sum().backward()
        wait()
        return middle - start, time.perf_counter() - start

    with parts_in(seconds) if question["parts"] else nullcontext():
        seconds["forward"], seconds["both"] = step(call)
    seconds["second"] = step(second_call)[1]
    return seconds


@contextmanager
def parts_in(seconds: dict[str, Any]) -> Iterator[None]:
    """Time parts of Headway's first call, which overlap; Triton is imported before it."""
    from headway import resolve
    from headway.backends import first_use
    from headway.backends.gpu.runtime import cuda_launch, kernel_cache, parallel_compile

    build = import_module("headway.blocks.build")  # the package has a function of that name
    parts = seconds["parts"] = {}
    undo = []
    for module, name, part in (
        (resolve, "lower", "tracing"),
        (build, "build", "block masks"),
        (parallel_compile, "wait_for_triton", "Triton's start"),
        (parallel_compile, "_compile_and_load", "compiling"),
        (cuda_launch, "_load", "loading"),
        (first_use, "_verdict", "the check at first use"),
    ):
        original = getattr(module, name)

        def timed(*given: Any, original: Any = original, part: str = part, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*given, **named)
            finally:
                parts[part] = parts.get(part, 0.0) + time.perf_counter() - start

        setattr(module, name, timed)
        undo.append((module, name, original))
    yield
    for module, name, original in undo:
        setattr(module, name, original)
    seconds["kernels"] = [[x.name, x.seconds, x.stages] for x in kernel_cache.log]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(json.load(sys.stdin))))
