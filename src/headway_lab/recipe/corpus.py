"""Real text that a machine has, as bytes: the source of Python's standard library, or of all
installed packages.

A token is a byte; one more token, BOUNDARY, opens every file and so closes the one before it.
Files are laid end to end and cut into sequences of one length; `ids` says which file each
position belongs to, and the document mask keeps attention inside it. Every choice here (which
files, which are held out, in what order they are read) is a function of the files and a seed:
there is no reader state, so batch `step` is the same in an unbroken run and in a resumed one.
"""

import csv
import hashlib
import io
import math
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from .errors import CorpusError

BOUNDARY = 256
VOCAB = 257

# Folders that are large and unlike the rest, absent from some distributions, or not the library.
EXCLUDED_FOLDERS = {
    "test", "tests", "idlelib", "idle_test", "lib2to3", "tkinter", "encodings", "pydoc_data",
    "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
HELD_OUT_ONE_IN = 32

Text = Literal["library", "packages"]
# Of packages: what people wrote to be read, and no table of data.
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}
LARGEST_FILE = 1_000_000
FAMILY_LETTERS = 3
FAMILIES_HELD_OUT_ONE_IN = 24


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


def load_corpus(root: Path | None = None, text: Text = "library") -> Corpus:
    """Load the text that a run trains on: `library_corpus` or `packages_corpus` of a folder."""
    return library_corpus(root) if text == "library" else packages_corpus(root)


def packages_corpus(root: Path | None = None) -> Corpus:
    """Read the sources and notes (`SUFFIXES`) of every package under `root` (default: this
    Python's site-packages) that are UTF-8 of at most a megabyte. Of files with the same bytes the
    first is kept, one to train on before one that is held out.

    Whole families of packages are held out: those whose first three letters have a SHA-256 that
    says so (one in 24). `torch`, `torchvision` and `torchgen` are one family, `jax` and `jaxlib`
    another, so that no release's files lie on both sides. Raises CorpusError as `library_corpus`.
    """
    root = Path(sysconfig.get_paths()["purelib"]) if root is None else Path(root)
    _check_folder(root, "packages")
    paths = (
        path
        for path in root.rglob("*")
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    )
    texts = _read(root, paths)
    digests: set[bytes] = set()
    texts_by_name: dict[str, bytes] = {}
    for name in sorted(texts, key=lambda name: (_family_is_held_out(name), name)):
        text = texts[name]
        digest = hashlib.sha256(text).digest()
        if len(text) <= LARGEST_FILE and digest not in digests and _is_utf8(text):
            digests.add(digest)
            texts_by_name[name] = text
    return _corpus(root, texts_by_name, _family_is_held_out, "source files of packages")


def library_corpus(root: Path | None = None) -> Corpus:
    """Read every `.py` file under `root` (default: this Python's standard library).

    A file is held out if the SHA-256 of its relative path says so (one in 32), so that adding a
    file never moves another one across. Raises CorpusError if there is no text, or too little to
    hold a file out.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else Path(root)
    _check_folder(root, ".py files")
    paths = (
        path
        for path in root.rglob("*.py")
        # _sysconfigdata_* records how this interpreter was built: flags and paths, not source.
        if not EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts)
        and not path.name.startswith("_sysconfigdata")
    )
    is_held_out = lambda name: _one_in(HELD_OUT_ONE_IN, name)
    return _corpus(root, _read(root, paths), is_held_out, ".py files")


def _check_folder(root: Path, kind: str) -> None:
    if not root.is_dir():
        raise CorpusError(f"corpus: {root} is not a folder; give one that holds {kind}")


def _read(root: Path, paths: Iterable[Path]) -> dict[str, bytes]:
    """Read the texts that are not empty, by relative path."""

    def text(path: Path) -> tuple[str, bytes]:
        try:
            name = path.relative_to(root).as_posix()
            name.encode()
            return name, path.read_bytes()
        except OSError as error:
            raise CorpusError(f"corpus: cannot read {path}: {error.strerror}") from error
        except UnicodeEncodeError as error:
            raise CorpusError(f"corpus: the name {str(path)!r} is not UTF-8; rename it") from error

    # A broken link is no file, nor is a pipe, which would never end.
    files = (path for path in paths if path.is_file())
    with ThreadPoolExecutor() as pool:  # a disk serves many readers sooner than one
        return {name: content for name, content in pool.map(text, files) if content}


def _corpus(
    root: Path, texts: dict[str, bytes], is_held_out: Callable[[str], bool], kind: str
) -> Corpus:
    names = sorted(texts)
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0{len(texts[name])}\0".encode() + texts[name])
    train = tuple(name for name in names if not is_held_out(name))
    held_out = tuple(name for name in names if is_held_out(name))
    if not train or not held_out:
        raise CorpusError(
            f"corpus: {len(names)} {kind} under {root}, {len(held_out)} of them held out for "
            f"validation; both parts need one at least. Give --corpus a folder with more {kind}"
            " (some Python distributions ship the standard library without its source)."
        )
    return Corpus(
        train, tuple(texts[name] for name in train), held_out,
        tuple(texts[name] for name in held_out), digest.hexdigest(),
    )  # fmt: skip


def listing(corpus: Corpus) -> str:
    """Return a CSV with a line for every package (or file) at the root of the corpus: its part, its
    files, their bytes, and a SHA-256 of their names and contents."""
    tops: dict[tuple[str, str], list[tuple[str, bytes]]] = defaultdict(list)
    for part, names, texts in (
        ("train", corpus.train_names, corpus.train_texts),
        ("held out", corpus.held_out_names, corpus.held_out_texts),
    ):
        for name, text in zip(names, texts, strict=True):
            tops[name.partition("/")[0], part].append((name, text))
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(("package", "part", "files", "bytes", "sha256"))
    for (top, part), files in sorted(tops.items()):
        digest = hashlib.sha256()
        for name, text in files:
            digest.update(f"{name}\0{len(text)}\0".encode() + text)
        size = sum(len(text) for _, text in files)
        table.writerow((top, part, len(files), size, digest.hexdigest()))
    return out.getvalue()


def _family_is_held_out(name: str) -> bool:
    package = name.partition("/")[0].lower().lstrip("_")
    letters = re.match("[a-z]*", package)
    assert letters is not None
    return _one_in(FAMILIES_HELD_OUT_ONE_IN, (letters[0] or package)[:FAMILY_LETTERS])


def _one_in(number: int, name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % number == 0


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in text


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
        joined = b"".join(b"\0" + texts[n] for n in order) + b"\0"
        stream = torch.frombuffer(bytearray(joined), dtype=torch.uint8).to(torch.int16)
        stream[starts] = BOUNDARY
        stream[-1] = BOUNDARY
        self.stream = stream
        self.ids = torch.repeat_interleave(torch.arange(len(order), dtype=torch.int32), lengths)
        self.sequences = math.ceil(len(self.ids) / context)

    def batch(self, step: int, batch_size: int) -> Batch:
        """Return a training step's batch: sequences in an order drawn anew for every epoch."""
        numbers = torch.arange(step * batch_size, (step + 1) * batch_size)
        rows = torch.empty_like(numbers)
        for epoch in (numbers // self.sequences).unique().tolist():
            in_epoch = numbers // self.sequences == epoch
            rows[in_epoch] = self._order(epoch)[numbers[in_epoch] % self.sequences]
        return self.rows(rows)

    def rows(self, rows: Tensor) -> Batch:
        """Return the sequences with these numbers, shape (len(rows), context)."""
        positions = rows[:, None] * self.context + torch.arange(self.context)
        real = positions < len(self.ids)
        positions = positions.clamp(max=len(self.ids) - 1)
        tokens = self.stream[positions].long()
        targets = self.stream[positions + 1].long().masked_fill(~real, -100)
        return Batch(tokens, targets, self.ids[positions].long())

    def _order(self, epoch: int) -> Tensor:
        if self.seed is None:
            return torch.arange(self.sequences)
        return torch.randperm(self.sequences, generator=_generator(self.seed * 1_000_003 + epoch))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
