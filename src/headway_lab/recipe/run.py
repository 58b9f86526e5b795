"""The folder of a run: what is in it, who may write to it, and the metrics.

runs/<name>/
  config.json             every setting, the corpus, the versions
  corpus.csv              the packages or files of the text, their sizes and SHA-256
  metrics.jsonl           one line of JSON per step
  checkpoints/            the last two: weights, optimizer, step
  model.safetensors       the newest weights alone
  loss.png  max_logit.png
  sample.txt              text that the trained model wrote
"""

import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import torch

import headway
from headway.errors import CheckpointError

from .checkpoint import list_checkpoints, write_text
from .config import Settings, from_json, to_json
from .corpus import Corpus, listing
from .errors import CorpusError, RunError


class Run:
    """An existing run. `create` makes a new one, `find` an old one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.model = folder / "model.safetensors"
        self.metrics = folder / "metrics.jsonl"

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.folder.name

    @staticmethod
    def create(settings: Settings, corpus: Corpus) -> "Run":
        """Make a new folder for this configuration. Raises RunError if the name is taken."""
        name = _free_name(settings.runs) if settings.name is None else settings.name
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise RunError(
                f"--name {name!r}: use letters, digits, '.', '_' and '-', and none of the last "
                "three first"
            )
        folder = settings.runs / name
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=False)
        except FileExistsError as error:
            raise RunError(
                f"the run {folder} exists and is not overwritten. Continue it with --name "
                f"{name} --resume, choose another --name, or delete the folder"
            ) from error
        except OSError as error:
            raise RunError(f"cannot make {folder}: {error.strerror}; choose --runs") from error
        run = Run(folder)
        try:
            run.write_config(replace(settings, name=name), corpus)
        except CheckpointError:
            shutil.rmtree(folder)  # made just now, and not a run without its configuration
            raise
        return run

    @staticmethod
    def find(runs: Path, name: str | None) -> "Run":
        """Return the run of that name, or the one saved last. Raises RunError with the names."""
        folders = sorted(
            (path.parent for path in runs.glob("*/config.json")),
            key=lambda folder: (
                (folder / "metrics.jsonl").stat().st_mtime
                if (folder / "metrics.jsonl").exists()
                else 0
            ),
        )
        if name is None and folders:
            return Run(folders[-1])
        if name is not None and runs / name in folders:
            return Run(runs / name)
        if name is not None and (runs / name).is_dir():
            raise RunError(
                f"{runs / name} is no run: config.json, which says what was trained, is missing"
            )
        names = ", ".join(sorted(folder.name for folder in folders)) or "none"
        problem = f"no run {name!r} in {runs}" if name else f"no run in {runs}"
        raise RunError(f"{problem} (there: {names}); --runs names another folder")

    def settings(self) -> Settings:
        """Return the settings of the run. Raises RunError if config.json is damaged."""
        try:
            return from_json(self._description()["config"])
        except (TypeError, KeyError) as error:
            raise _damaged(self.folder / "config.json", error) from error

    def check_corpus(self, corpus: Corpus) -> None:
        """Raise CorpusError if this is not the text that the run was trained on."""
        then = self._description()
        if then["corpus"]["sha256"] != corpus.sha256:
            raise CorpusError(
                f"{self.name} was trained on a text with SHA-256 {then['corpus']['sha256'][:16]}..."
                f" (Python {then['versions']['python']}), here it is {corpus.sha256[:16]}... "
                f"(Python {platform.python_version()}); resume with the Python that it was started "
                "with, or start a new run under another --name"
            )

    def write_config(self, settings: Settings, corpus: Corpus) -> None:
        """Write everything needed to know what was trained on what."""
        description = {
            "config": to_json(settings),
            "corpus": {
                "sha256": corpus.sha256,
                "train": {"files": len(corpus.train_names), "bytes": corpus.train_bytes},
                "held_out": {
                    "files": len(corpus.held_out_names),
                    "bytes": corpus.held_out_bytes,
                    "names": corpus.held_out_names,
                },
            },
            "versions": {
                "headway": headway.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        text = json.dumps(description, indent=2) + "\n"
        write_text(self.folder / "config.json", text)
        write_text(self.folder / "corpus.csv", listing(corpus))

    def newest_checkpoint(self) -> Path:
        """Return the newest checkpoint, or raise CheckpointError if there is none."""
        checkpoints = list_checkpoints(self.checkpoints)
        if not checkpoints:
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints}: the run cannot be resumed; start a new one "
                "under another --name"
            )
        return checkpoints[-1]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run, or raise RunError if another process is training this run."""
        lock = filelock.FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise RunError(f"the run {self.folder} is being trained by another process") from error
        except OSError as error:
            raise RunError(f"cannot write to {self.folder}: {error.strerror}") from error
        try:
            yield
        finally:
            lock.release()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the records of all steps. A last line that was cut off in writing is left out;
        RunError if the file is missing or damaged elsewhere."""
        records = []
        try:
            lines = self.metrics.read_text().splitlines()
            for n, line in enumerate(lines, start=1):
                try:
                    record = json.loads(line)
                    int(record["step"])
                    records.append(record)
                except (ValueError, TypeError, KeyError):
                    if n < len(lines):
                        raise ValueError(f"line {n} of {len(lines)}") from None
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.metrics} is damaged ({error}): repair it, or start a new run under another "
                "--name"
            ) from error
        return records

    def cut_metrics(self, step: int) -> None:
        """Drop what came after `step`: a resumed run records it again, with equal losses."""
        records = [record for record in self.read_metrics() if record["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in records)
        write_text(self.metrics, text)

    def _description(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        try:
            description = json.loads(path.read_text())
            if absent := {"config", "corpus", "versions"} - set(description):
                raise ValueError(f"it has no {', '.join(sorted(absent))}")
            return description
        except (OSError, ValueError, TypeError) as error:
            raise _damaged(path, error) from error


class MetricsLog:
    """Appends records to metrics.jsonl, each line whole."""

    def __init__(self, path: Path):
        self.path = path
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 closed by `close`

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, or raise CheckpointError if the disk is full."""
        self._guard(lambda: self.file.write((json.dumps(record) + "\n").encode()))

    def flush(self) -> None:
        """Flush to disk before a checkpoint, which must never be ahead of the metrics."""
        self._guard(lambda: os.fsync(self.file.fileno()))

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _guard(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            raise CheckpointError(
                f"could not write {self.path} ({error.strerror}); free some space and continue "
                "from the last checkpoint with --resume"
            ) from error


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"{path} is damaged ({error}): repair it, or name another run")


def _free_name(runs: Path) -> str:
    names = {path.name for path in runs.glob("run-*")}
    return next(f"run-{n}" for n in range(1, len(names) + 2) if f"run-{n}" not in names)
