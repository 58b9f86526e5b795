"""Train a byte-level language model with this library's attention. Read from top to bottom."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from headway.distributed import Layout
from headway.errors import CheckpointError
from headway.stability import logit_stats, monitor, reset_logit_stats
from headway.types import acc_dtype

from . import plots
from .checkpoint import (
    TrainingState,
    load_checkpoint,
    load_model,
    save_checkpoint,
    save_model,
    write_text,
)
from .config import Settings, TrainConfig, changed, learning_rate
from .corpus import BOUNDARY, Batch, Corpus, Packed, load_corpus
from .errors import RunError
from .machine import check_device, threads
from .model import Transformer
from .optim import Optimizers
from .ranks import Ranks, ranks_of
from .report import Report, print_start, say
from .run import MetricsLog, Run
from .sample import samples
from .shards import load_shards, placed, save_shards, whole

# Sequences of the held-out files in a look between steps: a fixed, evenly spread part of them.
GLANCE = 64


@dataclass(frozen=True)
class Trained:
    """The result of `train`: the run, its last step, and the signal that ended it early, if any."""

    run: Run
    step: int
    stopped_by: signal.Signals | None


def train(
    config: TrainConfig,
    resume: bool = False,
    console: Console | None = None,
    corpus: Corpus | None = None,
) -> Trained:
    """Train to the last step, or until Ctrl-C or SIGTERM: then the step under way is finished and
    saved. With `resume`, continue the run of that name from its newest checkpoint: the losses are
    those of an unbroken run, to the last bit. `corpus` is what `load_corpus` gave for these
    settings, where several runs share it.

    Raises ArgumentError (a setting), RunError (the folder), CorpusError (the text), CheckpointError
    (a file that cannot be read or written). What was saved before an error stays.
    """
    console = console or Console()
    settings = config.resolved()
    check_device(settings.device)
    if corpus is None:
        corpus = load_corpus(settings.corpus, settings.text)
    with ranks_of(settings) as ranks:
        if not ranks.first:
            console = Console(quiet=True)
        return _train(settings, corpus, resume, console, ranks)


def _train(
    settings: Settings, corpus: Corpus, resume: bool, console: Console, ranks: Ranks
) -> Trained:
    def folder() -> Path:
        if not resume:
            return Run.create(settings, corpus).folder
        run = Run.find(settings.runs, settings.name)
        _check_unchanged(run, settings)
        run.check_corpus(corpus)
        return run.folder

    run = Run(ranks.agree(folder))
    with run.locked() if ranks.first else nullcontext(), threads(settings.threads):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)  # for the initial weights: the only random draw
            model = Transformer(settings.model()).to(settings.device)
        ranks.shard(model)
        optimizers = Optimizers(model, settings, ranks.group)
        start = _restore(run, model, optimizers, ranks) if resume else 0
        print_start(console, run, settings, corpus, model, start)
        if not resume:
            _save(run, model, optimizers, 0, ranks)  # from here on, the run can always be resumed
        step, stopped_by = _loop(run, settings, model, optimizers, corpus, start, console, ranks)
        if ranks.first:
            if ranks.count > 1:
                model = load_model(run.model)
            _finish(run, model, console, sample=stopped_by is None)
    return Trained(run, step, stopped_by)


def _loop(
    run: Run, settings: Settings, model: Transformer, optimizers: Optimizers, corpus: Corpus,
    start: int, console: Console, ranks: Ranks,
) -> tuple[int, signal.Signals | None]:  # fmt: skip
    data = Packed(corpus.train_texts, settings.context, settings.seed)
    held_out = Packed(corpus.held_out_texts, settings.context)
    log = MetricsLog(run.metrics) if ranks.first else None
    step = saved = start
    loop_began = time.perf_counter()

    def save() -> int:
        if log is not None:
            log.flush()
        _save(run, model, optimizers, step, ranks)
        return step

    try:
        with _stop_signals() as stop, Report(console, settings.steps, start) as report:
            while step < settings.steps and not _any(ranks, stop):
                began = time.perf_counter()
                batch = data.batch(step, settings.batch)
                record: dict[str, Any] = {"step": step + 1}
                record |= _train_step(model, optimizers, batch, step, settings, ranks)
                step += 1
                now = time.perf_counter()
                record["tokens_per_second"] = record["tokens"] / (now - began)
                record["seconds"] = now - loop_began
                if not math.isfinite(record["loss"]):
                    raise RunError(
                        f"the loss is {record['loss']} at step {step}: the run has diverged. The "
                        f"checkpoint of step {saved} is kept; start a new run with a smaller --lr"
                    )
                is_last = step == settings.steps
                if is_last or step % settings.eval_every == 0:
                    rows = torch.arange(held_out.sequences)
                    rows = rows if is_last else rows[:: math.ceil(len(rows) / GLANCE)]
                    record |= evaluate(model, held_out, rows, settings, ranks)
                if log is not None:
                    log.write(record)
                    report.step(record)
                if step % settings.save_every == 0:
                    saved = save()
            if step > saved:
                saved = save()
    finally:
        if log is not None:
            log.close()
    if step == settings.steps:
        return step, None
    return step, stop[0] if stop else signal.SIGTERM  # another rank's


def _train_step(
    model: Transformer, optimizers: Optimizers, batch: Batch, step: int, settings: Settings,
    ranks: Ranks,
) -> dict[str, Any]:  # fmt: skip
    """Update the weights once, and return what the step records."""
    # Counted on the host, so that nothing waits for the device before the step's end.
    predictions, text_bytes = int((batch.targets >= 0).sum()), _count_bytes(batch.targets)
    local_batch, layout = ranks.cut(batch.to(torch.device(settings.device)))
    measured = settings.stats_every and step % settings.stats_every == 0
    with monitor(model) if measured else nullcontext() as watch:
        nats = _forward(model, local_batch, settings, layout)
    # The mean over the predictions of all ranks; FSDP divides by the number of ranks.
    loss = nats.sum() / predictions
    (loss * ranks.count).backward()
    total = ranks.total(nats.detach().sum())
    has_stats = settings.implementation == "headway"
    stats = logit_stats(model, ranks.group) if has_stats else {}
    clipped = optimizers.step(learning_rate(settings, step))
    if has_stats:
        reset_logit_stats(model)
    record: dict[str, Any] = {
        "loss": total.item() / predictions,
        "bits_per_byte": total.item() / math.log(2) / max(1, text_bytes),
        "max_logit": [s.tolist() for s in stats.values()],
        "tokens": batch.tokens.numel(),
    }
    if watch is not None:
        heads = watch.report(ranks.group).values()
        record["entropy"] = [head.entropy.tolist() for head in heads]
        record["sink_mass"] = [head.sink_mass.tolist() for head in heads]
    if clipped is not None:
        record["gamma"] = [g.tolist() for g in clipped.gamma.values()]
        record["clipped_heads"] = int(clipped.count)
    return record


def evaluate(
    model: Transformer, held_out: Packed, rows: Tensor, settings: Settings, ranks: Ranks
) -> dict[str, float]:
    """Measure bits per byte on these held-out sequences, and how many bytes they hold."""
    nats, size = 0.0, 0
    with torch.no_grad():
        for part in rows.split(settings.batch):
            batch = held_out.rows(part)
            local_batch, layout = ranks.cut(batch.to(torch.device(settings.device)), all_rows=True)
            batch_nats = _forward(model, local_batch, settings, layout).sum()
            nats += ranks.total(batch_nats, all_rows=True).item()
            size += _count_bytes(batch.targets)
    return {"held_out_bits_per_byte": nats / math.log(2) / size, "held_out_bytes": size}


def _forward(model: Transformer, batch: Batch, settings: Settings, layout: Layout | None) -> Tensor:
    """Return the loss of every position in nats, shape (positions,); that of padding is zero."""
    with torch.autocast(settings.device, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        logits = model(batch.tokens, batch.ids, layout)
    logits = logits.flatten(0, 1).to(acc_dtype(logits.dtype))
    return F.cross_entropy(logits, batch.targets.flatten(), reduction="none")


def _count_bytes(targets: Tensor) -> int:
    """Count predictions of a byte: those of a file's end cost bits, but are no bytes."""
    return int(((targets >= 0) & (targets != BOUNDARY)).sum())


def _finish(run: Run, model: Transformer, console: Console, sample: bool) -> None:
    """Draw the pictures, and if asked write the sample, that show how the run went."""
    records = run.read_metrics()
    try:
        plots.draw(records, run.folder, run.settings().qk_clip_tau)
    except ModuleNotFoundError:
        say(
            console,
            "no loss.png and max_logit.png: matplotlib is not installed; pip install matplotlib, "
            f"then `headway train --name {run.name} --resume` draws them",
        )
    length = run.settings().sample_bytes
    if sample and length:
        write_text(run.folder / "sample.txt", samples(model, length))


# -- saving and continuing ------------------------------------------------------------------------


def _save(run: Run, model: Transformer, optimizers: Optimizers, step: int, ranks: Ranks) -> None:
    state = TrainingState(step, model.state_dict(), optimizers.state())
    if ranks.count == 1:
        save_checkpoint(run.checkpoints, state)
    else:
        save_shards(run.checkpoints, state, ranks.first)
    weights = {name: whole(t) for name, t in state.model.items()}
    if ranks.first:
        save_model(run.model, model.config, weights, step)


def _restore(run: Run, model: Transformer, optimizers: Optimizers, ranks: Ranks) -> int:
    path = ranks.agree(run.newest_checkpoint)
    state = load_shards(path, model) if path.is_dir() else load_checkpoint(path)
    try:
        ours = model.state_dict()
        model.load_state_dict({n: placed(t, ours.get(n)) for n, t in state.model.items()})
        optimizers.load(state.optimizer)
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit the model of config.json: {error}; one of the two was changed"
        ) from error
    ranks.agree(lambda: run.cut_metrics(state.step))
    return state.step


def _check_unchanged(run: Run, settings: Settings) -> None:
    # Where the run lies is no setting of it: folders can be moved and renamed. Nor is on how many
    # devices it goes on, or what is measured beside it.
    ignored = {
        "name": run.name, "runs": settings.runs, "devices": 1, "context_parallel": None,
        "stats_every": 0,
    }  # fmt: skip
    if difference := changed(replace(settings, **ignored), replace(run.settings(), **ignored)):
        raise RunError(
            f"--resume continues {run.name} as it was started, but asked for {difference}; leave "
            "these out, or start a new run under another --name"
        )


def _any(ranks: Ranks, stop: list) -> bool:
    """Return True if any rank got a signal: all finish the same step."""
    return bool(ranks.largest(torch.tensor(float(bool(stop)), device=ranks.device)))


@contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """Collect the first Ctrl-C or SIGTERM; a second one interrupts at once, as usual."""
    received: list[signal.Signals] = []
    usual: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def record(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        restore()

    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            usual[number] = signal.signal(number, record)
    try:
        yield received
    finally:
        restore()
