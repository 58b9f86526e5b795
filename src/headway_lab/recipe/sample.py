"""Text from a trained model, one byte at a time, for many prompts at once."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headway.errors import ArgumentError

from .corpus import BOUNDARY
from .machine import threads
from .model import Transformer

PROMPTS = ("", "class ", "    def __init__(self, ")


def generate(
    model: Transformer, prompt: bytes, length: int, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """Yield the bytes that follow one prompt: see `generate_many`."""
    for (byte,) in generate_many(model, [prompt], length, temperature, seed):
        assert byte is not None
        yield byte


@torch.no_grad()
def generate_many(
    model: Transformer, prompts: Sequence[bytes], length: int, temperature: float = 0.8,
    seed: int = 0,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Yield up to `length` bytes that follow each prompt; fewer where the model ends the file.
    Every item has a byte for each prompt, None where it has ended.

    Each is drawn from softmax(logits / temperature), at temperature 0 the likeliest. A byte is
    predicted from those before it: at least half as many as the model was trained to see. When
    they no longer fit, the older half is forgotten and the rest is read again. Keys and values of
    all prompts lie in one paged cache; a prompt's bytes do not depend on the others.
    """
    if length < 0:
        raise ArgumentError(f"--length {length} must be 0 or more")
    if not 0 <= temperature < float("inf"):
        raise ArgumentError(f"--temperature {temperature} must be 0 or more")
    if not 0 <= seed < 2**32:
        raise ArgumentError(f"--seed {seed} must be from 0 to 2³² - 1")
    context, device = model.config.context, model.head.weight.device
    cache = model.cache(len(prompts))
    layers = [cache[n] for n in range(len(cache))]
    draws = [torch.Generator().manual_seed(seed) for _ in prompts]
    read_bytes = [[BOUNDARY, *prompt] for prompt in prompts]
    written = {row: text[-context:] for row, text in enumerate(read_bytes)}  # of those that go on
    for _ in range(length):
        for row, text in written.items():
            if cache.row_lengths[row] + len(text) > context:
                cache.free(row)
                written[row] = read_bytes[row][-max(1, context // 2) :]
        cache.reserve(list(written), [len(text) for text in written.values()])
        tokens = _aligned(written, len(prompts)).to(device)
        logits = model.decode(tokens, layers)[:, -1].float().cpu()
        step: list[int | None] = [None] * len(prompts)
        for row in list(written):
            token = _draw(logits[row], temperature, draws[row])
            if token == BOUNDARY:
                cache.free(row)
                del written[row]
                continue
            step[row], written[row] = token, [token]
            read_bytes[row].append(token)
        if not written:
            return
        yield step


def _aligned(fresh: dict[int, list[int]], rows: int) -> Tensor:
    """Return tokens by row, `(rows, longest)`, aligned at their last."""
    longest = max(map(len, fresh.values()))
    return torch.tensor([
        [BOUNDARY] * (longest - len(fresh.get(row, ()))) + list(fresh.get(row, ()))
        for row in range(rows)
    ])  # fmt: skip


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))


def samples(model: Transformer, length: int = 240, temperature: float = 0.8) -> str:
    """Return a few samples as one text, each under the prompt that it continues."""
    with threads(1):  # one byte is too little work to share
        steps = list(generate_many(model, [p.encode() for p in PROMPTS], length, temperature))
    return "\n".join(
        f"--- prompt: {prompt!r}\n{prompt}{text_of(steps, row)}\n"
        for row, prompt in enumerate(PROMPTS)
    )


def text_of(steps: Sequence[Sequence[int | None]], row: int) -> str:
    """Return the text that was generated for one prompt."""
    return bytes([step[row] for step in steps if step[row] is not None]).decode(errors="replace")  # type: ignore[misc]
