"""Real text that every machine has: the source of Python's standard library, as bytes.

A token is a byte; one more token, BOUNDARY, opens every file and so closes the one before it.
Files are laid end to end and cut into sequences of one length; `ids` says which file each
position belongs to, and the document mask keeps attention inside it. Every choice here (which
files, which are held out, in what order they are read) is a function of the files and a seed:
there is no reader state, so batch `step` is the same in an unbroken run and in a resumed one.
"""

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .errors import CorpusError

BOUNDARY = 256
VOCAB = 257

# Folders that are large and unlike the rest, absent from some distributions, or not the library.
EXCLUDED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "lib2to3",
    "tkinter",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
HELD_OUT_ONE_IN = 32


@dataclass(frozen=True)
class Corpus:
    """The text: files for training, and whole other files for validation.

    `names` are paths relative to the root with forward slashes, in sorted order; `sha256` is over
    names and contents of all files, so two machines with the same value train on the same bytes.
    """

    train_names: tuple[str, ...]
    train_texts: tuple[bytes, ...]
    held_out_names: tuple[str, ...]
    held_out_texts: tuple[bytes, ...]
    sha256: str

    @property
    def train_bytes(self) -> int:
        return sum(map(len, self.train_texts))

    @property
    def held_out_bytes(self) -> int:
        return sum(map(len, self.held_out_texts))


def load_corpus(root: Path | None = None) -> Corpus:
    """Read every `.py` file under `root` (default: this Python's standard library).

    A file is held out if the SHA-256 of its relative path says so (one in 32), so that adding a
    file never moves another one across. Raises CorpusError if there is no text, or too little to
    hold a file out.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else Path(root)
    if not root.is_dir():
        raise CorpusError(f"corpus: {root} is not a folder; give one that holds .py files")
    texts: dict[str, bytes] = {}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        # _sysconfigdata_* records how this interpreter was built: flags and paths, not source.
        if EXCLUDED_FOLDERS.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"corpus: cannot read {path}: {error.strerror}") from error
        if text:
            texts[relative.as_posix()] = text
    names = sorted(texts)
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0{len(texts[name])}\0".encode() + texts[name])
    train = tuple(name for name in names if not _is_held_out(name))
    held_out = tuple(name for name in names if _is_held_out(name))
    if not train or not held_out:
        raise CorpusError(
            f"corpus: {len(names)} .py files under {root}, {len(held_out)} of them held out for "
            "validation; both parts need one at least. Give --corpus a folder with more .py files"
            " (some Python distributions ship the standard library without its source)."
        )
    return Corpus(
        train,
        tuple(texts[name] for name in train),
        held_out,
        tuple(texts[name] for name in held_out),
        digest.hexdigest(),
    )


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Batch:
    """`tokens`, `targets`, `ids`: (batch, context) int64. A target of -100 is padding: no loss."""

    tokens: Tensor
    targets: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(t.to(device) for t in (self.tokens, self.targets, self.ids)))


class Packed:
    """Texts laid end to end and cut into sequences of `context` tokens.

    A text of n bytes gives n + 1 predictions: the boundary predicts its first byte, its last byte
    predicts the next boundary. Nothing is dropped and only the very last sequence is padded.
    """

    def __init__(self, texts: tuple[bytes, ...], context: int, seed: int | None = None):
        order = list(range(len(texts)))
        if seed is not None:
            order = torch.randperm(len(texts), generator=_generator(seed)).tolist()
        self.bytes = sum(map(len, texts))
        self.context = context
        self.seed = seed
        lengths = torch.tensor([len(texts[n]) + 1 for n in order])
        starts = lengths.cumsum(0) - lengths
        stream = torch.empty(int(lengths.sum()) + 1, dtype=torch.int16)
        for n, start in zip(order, starts.tolist(), strict=True):
            text = torch.frombuffer(bytearray(texts[n]), dtype=torch.uint8)
            stream[start + 1 : start + 1 + len(text)] = text
        stream[starts] = BOUNDARY
        stream[-1] = BOUNDARY
        self.stream = stream
        self.ids = torch.repeat_interleave(torch.arange(len(order), dtype=torch.int32), lengths)
        self.sequences = math.ceil(len(self.ids) / context)

    def batch(self, step: int, batch_size: int) -> Batch:
        """The batch of one training step: sequences in an order drawn anew for every epoch."""
        at = torch.arange(step * batch_size, (step + 1) * batch_size)
        rows = torch.empty_like(at)
        for epoch in (at // self.sequences).unique().tolist():
            here = at // self.sequences == epoch
            rows[here] = self._order(epoch)[at[here] % self.sequences]
        return self.rows(rows)

    def rows(self, rows: Tensor) -> Batch:
        """The sequences with these numbers, shape (len(rows), context)."""
        at = rows[:, None] * self.context + torch.arange(self.context)
        real = at < len(self.ids)
        at = at.clamp(max=len(self.ids) - 1)
        tokens = self.stream[at].long()
        targets = self.stream[at + 1].long().masked_fill(~real, -100)
        return Batch(tokens, targets, self.ids[at].long())

    def _order(self, epoch: int) -> Tensor:
        if self.seed is None:
            return torch.arange(self.sequences)
        return torch.randperm(self.sequences, generator=_generator(self.seed * 1_000_003 + epoch))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
