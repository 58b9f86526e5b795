"""Train a byte-level language model with this library's attention. Read from top to bottom."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from ..errors import CheckpointError
from ..stability import logit_stats, reset_logit_stats
from . import plots
from .checkpoint import State, load_checkpoint, save_checkpoint, save_model, write_text
from .config import Settings, TrainConfig, changed, learning_rate
from .corpus import BOUNDARY, Batch, Corpus, Packed, load_corpus
from .errors import RunError
from .machine import check_device, threads
from .model import Transformer
from .optim import Optimizers
from .report import Report, print_start, say
from .run import MetricsLog, Run
from .sample import samples

# Sequences of the held-out files in a look between steps: a fixed, evenly spread part of them.
GLANCE = 64


@dataclass(frozen=True)
class Trained:
    """What `train` returns: the run, its last step, and the signal that ended it early, if any."""

    run: Run
    step: int
    stopped_by: signal.Signals | None


def train(config: TrainConfig, resume: bool = False, console: Console | None = None) -> Trained:
    """Train to the last step, or until Ctrl-C or SIGTERM: then the step under way is finished and
    saved. With `resume`, continue the run of that name from its newest checkpoint: the losses are
    those of an unbroken run, to the last bit.

    Raises ArgumentError (a setting), RunError (the folder), CorpusError (the text), CheckpointError
    (a file that cannot be read or written). What was saved before an error stays.
    """
    console = console or Console()
    settings = config.resolved()
    check_device(settings.device)
    corpus = load_corpus(settings.corpus)
    if resume:
        run = Run.find(settings.runs, settings.name)
        _check_unchanged(run, settings)
        run.check_corpus(corpus)
    else:
        run = Run.create(settings, corpus)
    with run.locked(), threads(settings.threads):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)  # for the initial weights: the only random draw
            model = Transformer(settings.model()).to(settings.device)
        optimizers = Optimizers(model, settings)
        start = _restore(run, model, optimizers) if resume else 0
        print_start(console, run, settings, corpus, model, start)
        if not resume:
            _save(run, model, optimizers, 0)  # from here on, the run can always be resumed
        step, stopped_by = _loop(run, settings, model, optimizers, corpus, start, console)
        _finish(run, model, console, sample=stopped_by is None)
    return Trained(run, step, stopped_by)


def _loop(
    run: Run,
    settings: Settings,
    model: Transformer,
    optimizers: Optimizers,
    corpus: Corpus,
    start: int,
    console: Console,
) -> tuple[int, signal.Signals | None]:
    device = torch.device(settings.device)
    data = Packed(corpus.train_texts, settings.context, settings.seed)
    held_out = Packed(corpus.held_out_texts, settings.context)
    log = MetricsLog(run.metrics)
    step = saved = start

    def save() -> int:
        log.flush()
        _save(run, model, optimizers, step)
        return step

    try:
        with _stop_signals() as stop, Report(console, settings.steps, start) as report:
            while step < settings.steps and not stop:
                began = time.perf_counter()
                batch = data.batch(step, settings.batch).to(device)
                nats = _forward(model, batch, settings)
                loss = nats.mean()
                loss.backward()
                stats = logit_stats(model)
                clipped = optimizers.step(learning_rate(settings, step))
                reset_logit_stats(model)
                step += 1
                record = {
                    "step": step,
                    "loss": loss.item(),
                    "bits_per_byte": _bits_per_byte(nats.sum().item(), batch.targets),
                    "max_logit": [s.tolist() for s in stats.values()],
                    "tokens": batch.tokens.numel(),
                    "tokens_per_second": batch.tokens.numel() / (time.perf_counter() - began),
                }
                if clipped is not None:
                    record["gamma"] = [g.tolist() for g in clipped.gamma.values()]
                    record["clipped_heads"] = int(clipped.count)
                if not math.isfinite(record["loss"]):
                    raise RunError(
                        f"the loss is {record['loss']} at step {step}: the run has diverged. The "
                        f"checkpoint of step {saved} is kept; start a new run with a smaller --lr"
                    )
                last = step == settings.steps
                if last or step % settings.eval_every == 0:
                    rows = torch.arange(held_out.sequences)
                    rows = rows if last else rows[:: math.ceil(len(rows) / GLANCE)]
                    record |= evaluate(model, held_out, rows, settings)
                log.write(record)
                report.step(record)
                if step % settings.save_every == 0:
                    saved = save()
            if step > saved:
                saved = save()
    finally:
        log.close()
    return step, (stop[0] if step < settings.steps else None)


def evaluate(
    model: Transformer, held_out: Packed, rows: Tensor, settings: Settings
) -> dict[str, float]:
    """Bits per byte on these sequences of the held-out files, and how many bytes they hold."""
    nats, size = 0.0, 0
    with torch.no_grad():
        for part in rows.split(settings.batch):
            batch = held_out.rows(part).to(torch.device(settings.device))
            nats += _forward(model, batch, settings).sum().item()
            size += _count_bytes(batch.targets)
    return {"held_out_bits_per_byte": nats / math.log(2) / size, "held_out_bytes": size}


def _forward(model: Transformer, batch: Batch, settings: Settings) -> Tensor:
    """The loss of every real position in nats, shape (positions,)."""
    with torch.autocast(settings.device, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
        logits = model(batch.tokens, batch.ids)
    real = batch.targets.flatten() >= 0
    nats = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    return nats[real]


def _bits_per_byte(nats: float, targets: Tensor) -> float:
    return nats / math.log(2) / max(1, _count_bytes(targets))


def _count_bytes(targets: Tensor) -> int:
    """Predictions of a byte. Those of a file's end cost bits too, but are no bytes of the text."""
    return int(((targets >= 0) & (targets != BOUNDARY)).sum())


def _finish(run: Run, model: Transformer, console: Console, sample: bool) -> None:
    """The pictures, and if asked the text, that tell at a glance how the run went."""
    records = run.read_metrics()
    try:
        plots.draw(records, run.folder, run.settings().qk_clip_tau)
    except ModuleNotFoundError:
        say(
            console,
            f"no loss.png and max_logit.png: matplotlib is not installed; pip install "
            f"'headway[plot]', then `headway train --name {run.name} --resume` draws them",
        )
    if sample:
        write_text(run.folder / "sample.txt", samples(model))


# -- saving and continuing ------------------------------------------------------------------------


def _save(run: Run, model: Transformer, optimizers: Optimizers, step: int) -> None:
    save_checkpoint(run.checkpoints, State(step, model.state_dict(), optimizers.state()))
    save_model(run.model, model, step)


def _restore(run: Run, model: Transformer, optimizers: Optimizers) -> int:
    path = run.newest_checkpoint()
    state = load_checkpoint(path)
    try:
        model.load_state_dict(state.model)
        optimizers.load(state.optimizer)
    except (RuntimeError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit the model of config.json: {error}; one of the two was changed"
        ) from error
    run.cut_metrics(state.step)
    return state.step


def _check_unchanged(run: Run, settings: Settings) -> None:
    # Where the run lies is no setting of it: folders can be moved and renamed.
    here = {"name": run.name, "runs": settings.runs}
    if difference := changed(replace(settings, **here), replace(run.settings(), **here)):
        raise RunError(
            f"--resume continues {run.name} as it was started, but asked for {difference}; leave "
            "these out, or start a new run under another --name"
        )


@contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """Collects the first Ctrl-C or SIGTERM; a second one interrupts at once, as usual."""
    received: list[signal.Signals] = []
    usual: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)

    def remember(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        restore()

    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            usual[number] = signal.signal(number, remember)
    try:
        yield received
    finally:
        restore()
