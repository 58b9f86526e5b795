"""`headway sample`."""

import codecs
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..recipe.checkpoint import load_model
from ..recipe.machine import threads
from ..recipe.run import Run
from ..recipe.sample import generate_many, text_of


@dataclass(frozen=True)
class Arguments:
    """Generate text with a trained model, byte by byte.

    One text is printed while it is generated. Several are generated together and printed at the
    end. The speed is printed to standard error.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name of the run, or the path of a model.safetensors."""
    prompt: tuple[str, ...] = ("",)
    """Text to continue, one or several. Empty: the beginning of a file."""
    length: int = 500
    """Largest number of bytes to generate. The model may end the file before."""
    temperature: float = 0.8
    """1 samples from the model's probabilities, less sharpens them, 0 takes the likeliest byte."""
    seed: int = 0
    """Seed of the sampling. The same seed gives the same text."""
    runs: Path = Path("runs")
    """Folder that holds the runs."""


def main(arguments: list[str]) -> int:
    """Run `headway sample`; return exit status 0."""
    options = tyro.cli(Arguments, args=arguments, prog="headway sample")
    path = Path(options.run)
    if not path.is_file():
        path = Run.find(options.runs, options.run).model
    model, prompts = load_model(path), options.prompt or ("",)
    encoded = [prompt.encode(errors="replace") for prompt in prompts]
    start = time.perf_counter()
    with threads(1):  # one byte is too little work to share
        steps = generate_many(model, encoded, options.length, options.temperature, options.seed)
        generated = _stream(prompts[0], steps) if len(prompts) == 1 else list(steps)
    seconds = time.perf_counter() - start
    if len(prompts) > 1:
        for row, prompt in enumerate(prompts):
            print(f"--- prompt: {prompt!r}\n{prompt}{text_of(generated, row)}\n")
    count = sum(byte is not None for step in generated for byte in step)
    print(f"{count} bytes, {count / seconds:,.0f} a second", file=sys.stderr)
    return 0


def _stream(prompt: str, steps: Iterable[list[int | None]]) -> list[list[int | None]]:
    """Print one text as it comes."""
    text, generated = codecs.getincrementaldecoder("utf-8")("replace"), []
    sys.stdout.write(prompt)
    for step in steps:
        generated.append(step)
        sys.stdout.write(text.decode(bytes([byte for byte in step if byte is not None])))
        sys.stdout.flush()
    print(text.decode(b"", final=True))
    return generated
