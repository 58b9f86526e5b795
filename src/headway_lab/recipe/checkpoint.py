"""Saved weights and checkpoints: safetensors files, written beside and renamed.

A checkpoint is one file: weights ("model/..."), optimizer tensors ("optimizer/...") and, as
metadata, the step and a SHA-256 of all tensors. There is nothing else to save: the data order and
the learning rate are functions of the step, and no random numbers are drawn while training. One
file is renamed in one stroke, needs no unpickling, and a damaged one is recognised. (State that is
spread over processes is written by PyTorch's distributed checkpoint, a folder: `shards.py`.)
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from headway.errors import CheckpointError

from .model import ModelConfig, Transformer

KEEP = 2  # the newest, and one more in case the newest turns out damaged


class TrainingState(NamedTuple):
    """The content of a checkpoint."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a file beside `path`, flush it to the disk, rename it to `path`.

    At every moment `path` is the old file or the new one, whole. If writing fails the file beside
    is removed and CheckpointError says why and that the old one is there.
    """
    beside = path.with_name(path.name + ".partial")
    try:
        write(beside)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        _flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise CheckpointError(_failure(path, error)) from error


def write_text(path: Path, text: str) -> None:
    """Write text as `write_beside` does."""
    write_beside(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def save_checkpoint(folder: Path, state: TrainingState) -> Path:
    """Write `step-000100.safetensors` for step 100 and drop all but the last two.

    Raises CheckpointError if a tensor is not finite or the file cannot be written; the checkpoints
    that are there stay.
    """
    tensors = flat(state)
    for name, t in tensors.items():
        if not t.isfinite().all():
            raise CheckpointError(
                f"{name} holds NaN or infinity after step {state.step}: not saved. The last good "
                f"checkpoints are in {folder}; start a new run with a smaller --lr"
            )
    tensors = {name: t.contiguous().cpu() for name, t in tensors.items()}
    metadata = {"step": str(state.step), "sha256": _digest(tensors)}
    path = folder / f"step-{state.step:06d}.safetensors"
    _write_tensors(path, tensors, metadata)
    drop_outdated(folder)
    return path


def flat(state: TrainingState) -> dict[str, Tensor]:
    """Return all tensors of a state by name: "model/..." and "optimizer/..."."""
    tensors = {f"model/{name}": t for name, t in state.model.items()}
    return tensors | {f"optimizer/{name}": t for name, t in state.optimizer.items()}


def unflat(step: int, tensors: dict[str, Tensor]) -> TrainingState:
    """Return the state whose tensors `flat` has named."""
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
    for key, tensor in tensors.items():
        part, name = key.split("/", 1)
        parts[part][name] = tensor
    return TrainingState(step, **parts)


def drop_outdated(folder: Path) -> None:
    """Delete all checkpoints but the newest `KEEP`."""
    for outdated in list_checkpoints(folder)[:-KEEP]:
        shutil.rmtree(outdated) if outdated.is_dir() else outdated.unlink()


def load_checkpoint(path: Path) -> TrainingState:
    """Read a checkpoint, or raise CheckpointError if it cannot be read or was changed."""
    try:
        tensors, metadata = _read(path)
        step = int(metadata["step"])
        if _digest(tensors) != metadata["sha256"]:
            raise ValueError("its tensors do not have the checksum that was saved with them")
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        others = [p.name for p in list_checkpoints(path.parent) if p != path]
        way_out = (
            f"delete or move it, and --resume continues from {others[-1]}"
            if others
            else "there is no other checkpoint: start a new run under another --name"
        )
        raise CheckpointError(f"checkpoint {path} is damaged ({error}); {way_out}") from error
    return unflat(step, tensors)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, oldest first. Those of several devices are folders (`shards.py`)."""
    paths = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+(\.safetensors)?", p.name)]
    return sorted(paths, key=lambda p: int(p.stem.split("-")[1]))


def save_model(path: Path, config: ModelConfig, weights: dict[str, Tensor], step: int) -> None:
    """Save the weights, with the sizes of the network as metadata: all that sampling needs."""
    metadata = {"step": str(step), "model": json.dumps(asdict(config))}
    tensors = {name: t.contiguous().cpu() for name, t in weights.items()}
    _write_tensors(path, tensors, metadata)


def load_model(path: Path) -> Transformer:
    """Read a model, or raise CheckpointError if the file does not hold one."""
    try:
        tensors, metadata = _read(path)
        model = Transformer(ModelConfig(**json.loads(metadata["model"])))
        model.load_state_dict(tensors)
    except (OSError, safetensors.SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read a model from {path}: {error}") from error
    except RuntimeError as error:  # names or shapes of load_state_dict
        raise CheckpointError(f"{path} holds the weights of another model: {error}") from error
    return model


def _write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    # Through memory: safetensors' own `save_file` makes files that only their owner may read.
    data = _in_order(safetensors.torch.save(tensors, metadata))
    write_beside(path, lambda beside: beside.write_bytes(data))


def _in_order(data: bytes) -> bytes:
    """Sort a file's header, whose order differs by process, so that equal runs have equal files."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:start]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[start:]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 not a dict


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _failure(path: Path, error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    check = "check that the folder is there and may be written to"
    way_out = "free some space" if full else check
    return (
        f"could not write {path} ({error.strerror}): {way_out}. What was saved before is whole; "
        "continue with --resume"
    )


def _flush_folder(folder: Path) -> None:
    """Flush a folder to disk: only then does a rename survive a power cut."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
