"""`headway train`."""

import logging
import shlex
import signal
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from headway.cli.options import default_words
from headway.errors import ArgumentError, CheckpointError

from ..recipe import TrainConfig, train
from ..recipe.errors import CorpusError, RunError
from ..recipe.presets import preset
from ..recipe.ranks import is_first, started
from ..recipe.report import say
from ..recipe.run import Run


@dataclass(frozen=True)
class Arguments(TrainConfig):
    """Train a byte-level transformer on the source code of your Python.

    Files are packed into sequences under a document mask, and other files are held out. The run
    writes weights, metrics, pictures and generated text to runs/NAME. Ctrl-C saves and stops it.
    --resume continues it, with the losses of a run that never stopped.
    """

    preset: Annotated[str | None, default_words("none", "NAME")] = None
    """Start from the settings of a long run on a GPU: 60m, 60m-explode or 19m."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continue the run from its last checkpoint, with its settings."""

    def config(self) -> TrainConfig:
        """Return the settings alone."""
        return TrainConfig(
            **{field.name: getattr(self, field.name) for field in fields(TrainConfig)}
        )


def main(arguments: list[str]) -> int:
    """Run `headway train`; return 0, or 128 + the number of the signal that stopped it."""
    options = _parse(arguments, Arguments())
    if options.preset is not None:
        if options.resume:
            raise ArgumentError(
                f"--preset {options.preset} with --resume: a run goes on with the settings that it "
                "was started with; leave out --preset"
            )
        # Parsed again over the settings of the preset: what is given counts.
        options = _parse(arguments, Arguments(**vars(preset(options.preset))))
    if options.resume:
        # Parsed again over the settings of the run: what is not given keeps the run's value, and
        # what is given and differs is refused by `train`.
        run = Run.find(options.runs, options.name)
        saved = replace(run.settings(), name=run.name, runs=options.runs)
        options = _parse(arguments, Arguments(**vars(saved)))
    if options.devices > 1 and not started():
        options.config().resolved()  # a mistake is one message, not one of every process
        return _start(arguments, options.devices)
    if started() > 1 and options.devices == 1:  # by torchrun, which says how many
        options = replace(options, devices=started())
    console = Console()
    trained = train(options.config(), options.resume, console)
    if not is_first():
        return 128 + trained.stopped_by if trained.stopped_by else 0
    folder, steps = trained.run.folder, trained.run.settings().steps
    if trained.stopped_by:
        say(
            console,
            f"stopped by {trained.stopped_by.name} and saved after step {trained.step}/{steps}; "
            f"continue with: headway train --name {folder.name} --resume{_runs(folder)}",
        )
        return 128 + trained.stopped_by
    last_record = trained.run.read_metrics()[-1]
    say(
        console,
        f"done: {last_record['held_out_bits_per_byte']:.3f} bits per byte on the "
        f"{last_record['held_out_bytes']:,} held-out bytes; see {folder}, or let it write: "
        f'headway sample {folder.name} --prompt "def "{_runs(folder)}',
    )
    return 0


def _start(arguments: list[str], devices: int) -> int:
    """Start as many processes of this command, which torchrun's agent looks after. What one of them
    refuses is raised here, without the tracebacks that the agent would log of each. Ctrl-C reaches
    them from the terminal: a second one, from the agent, would interrupt them while they save."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=devices, run_id="headway-train",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, start_method="spawn",
        signals_to_handle="SIGTERM",
    )  # fmt: skip
    # The first Ctrl-C is theirs to save on, the second one ends them and this process.
    usual = signal.signal(
        signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    try:
        return elastic_launch(config, main)(arguments)[0]
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        failure = error.get_first_failure()[1]
        if failure.exitcode == -signal.SIGINT:  # Ctrl-C before the first step
            raise KeyboardInterrupt from error
        content: Any = failure.error_file_data
        with suppress(KeyError, TypeError):  # a process that was killed leaves no file
            name, _, text = content["message"]["message"].partition(": ")
            for refusal in (ArgumentError, CheckpointError, CorpusError, RunError):
                if refusal.__name__ == name:
                    raise refusal(text) from error
        raise
    finally:
        signal.signal(signal.SIGINT, usual)


def _runs(folder: Path) -> str:
    """Return the option that the next command needs to find the run."""
    return "" if folder.parent == Path("runs") else f" --runs {shlex.quote(str(folder.parent))}"


def _parse(arguments: list[str], default: Arguments) -> Arguments:
    return tyro.cli(Arguments, args=arguments, default=default, prog="headway train")
