"""Text from a trained model, one byte at a time."""

from collections.abc import Iterator

import torch

from ..errors import ArgumentError
from .corpus import BOUNDARY
from .machine import threads
from .model import Past, Transformer

PROMPTS = ("", "class ", "    def __init__(self, ")


@torch.no_grad()
def generate(
    model: Transformer, prompt: bytes, length: int, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """Up to `length` bytes that follow `prompt`; fewer if the model ends the file.

    Each is drawn from softmax(logits / temperature), at temperature 0 the likeliest. A byte is
    predicted from those before it: at least half as many as the model was trained to see. When
    they no longer fit, the older half is forgotten and the rest is read again.
    """
    if length < 0:
        raise ArgumentError(f"--length {length} must be 0 or more")
    if not 0 <= temperature < float("inf"):
        raise ArgumentError(f"--temperature {temperature} must be 0 or more")
    if not 0 <= seed < 2**32:
        raise ArgumentError(f"--seed {seed} must be from 0 to 2³² - 1")
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    context = model.config.context
    seen = [BOUNDARY, *prompt]
    pasts, new = [Past() for _ in model.blocks], seen[-context:]
    for _ in range(length):
        if pasts[0].length + len(new) > context:
            pasts, new = [Past() for _ in model.blocks], seen[-max(1, context // 2) :]
        logits = model.decode(torch.tensor([new], device=device), pasts)[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(
                torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            )
        if token == BOUNDARY:
            return
        yield token
        new = [token]
        seen.append(token)


def samples(model: Transformer, length: int = 240, temperature: float = 0.8) -> str:
    """A few samples as one text, each under the prompt that it continues."""
    parts = []
    for prompt in PROMPTS:
        with threads(1):  # one byte is too little work to share
            text = bytes(generate(model, prompt.encode(), length, temperature))
        parts.append(f"--- prompt: {prompt!r}\n{prompt}{text.decode(errors='replace')}\n")
    return "\n".join(parts)
