"""`headway sample`."""

import codecs
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..recipe.checkpoint import load_model
from ..recipe.machine import threads
from ..recipe.run import Run
from ..recipe.sample import generate


@dataclass(frozen=True)
class Arguments:
    """Let the model of a run write, byte by byte, and print it as it comes."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name of the run, or the path of a model.safetensors."""
    prompt: str = ""
    """What it continues. Empty: the beginning of a file."""
    length: int = 500
    """Bytes to write, at most; it stops earlier where it ends the file."""
    temperature: float = 0.8
    """1 draws from the model's own probabilities, less is bolder, 0 always takes the likeliest."""
    seed: int = 0
    """The same seed gives the same text."""
    runs: Path = Path("runs")
    """Folder that holds the runs."""


def main(arguments: list[str]) -> int:
    """Exit status 0."""
    asked = tyro.cli(Arguments, args=arguments, prog="headway sample")
    path = Path(asked.run)
    if not path.is_file():
        path = Run.find(asked.runs, asked.run).model
    model = load_model(path)
    prompt = asked.prompt.encode(errors="replace")
    text = codecs.getincrementaldecoder("utf-8")("replace")
    sys.stdout.write(asked.prompt)
    with threads(1):  # one byte is too little work to share
        for byte in generate(model, prompt, asked.length, asked.temperature, asked.seed):
            sys.stdout.write(text.decode(bytes([byte])))
            sys.stdout.flush()
    print(text.decode(b"", final=True))
    return 0
