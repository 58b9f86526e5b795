"""What a training run shows while it goes: a progress bar on a terminal, plain lines elsewhere."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from .config import Settings
from .corpus import Corpus
from .model import Transformer
from .run import Run

LINES = 20  # plain lines in a run, about


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup (folders may have brackets), no colour, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class _TwoLines(Progress):
    """The bar, and below it the numbers: beside each other they need more than 80 columns."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.description, no_wrap=True) for task in self.tasks)


class Report:
    """Call `step` with the record of every step; the bar lives between `with` and its end."""

    def __init__(self, console: Console, total: int, start: int):
        self.console = console
        self.total = total
        self.every = max(1, total // LINES)
        self.held_out = ""  # the last look at the held-out files, and when it was
        self.heads = ""  # and at the statistics of heads
        self.bar = _TwoLines(
            TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=None),
            TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(elapsed_when_finished=True),
            console=console, disable=not console.is_terminal, expand=True,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=total, completed=start)

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        """Show a `record`, a line of metrics.jsonl."""
        step = record["step"]
        if "held_out_bits_per_byte" in record:
            self.held_out = f"held out {record['held_out_bits_per_byte']:.3f} at step {step}  "
        text = (
            f"loss {record['loss']:.3f}  {record['bits_per_byte']:.3f} bits/byte  {self.held_out}"
            f"{record['tokens_per_second']:,.0f} tokens/s"
        )
        if record["max_logit"]:
            text += f"  max logit {max(map(max, record['max_logit'])):.1f}"
        if record.get("clipped_heads"):
            text += f", {record['clipped_heads']} clipped"
        if "entropy" in record:
            self.heads = f"\n{heads_line(record)} at step {step}"
        self.bar.update(self.task, completed=step, description=text + self.heads)
        if not self.console.is_terminal and (step % self.every == 0 or step == self.total):
            seconds_left = (self.total - step) * record["tokens"] / record["tokens_per_second"]
            say(
                self.console,
                f"step {step}/{self.total}  {text}  {seconds_left:.0f} s left{self.heads}",
            )
            self.heads = ""


def heads_line(record: dict[str, Any]) -> str:
    """Return the least and the largest entropy and the largest sink mass, with their heads."""

    def shown(name: str, choose: Any) -> str:
        value, layer, head = choose(
            (value, layer, head)
            for layer, of_layer in enumerate(record[name])
            for head, value in enumerate(of_layer)
        )
        return f"{value:.2f} (layer {layer} head {head})"

    entropies = f"{shown('entropy', min)} to {shown('entropy', max)}"
    return f"  entropy {entropies}  sink mass up to {shown('sink_mass', max)}"


def print_start(
    console: Console, run: Run, s: Settings, corpus: Corpus, model: Transformer, start: int
) -> None:
    """Print what will be trained on what, in four lines."""
    weights = sum(p.numel() for p in model.parameters())
    files, held_out = len(corpus.train_names), len(corpus.held_out_names)
    heads = f"{s.heads} query and {s.kv_heads} key heads"
    if s.attention == "mla":
        heads = f"{s.heads} heads of latent attention"
    for line in (
        f"resuming {run.folder} after step {start}" if start else f"training {run.folder}",
        f"  text   {files} files, {corpus.train_bytes / 1e6:.2f} MB; held out {held_out} files, "
        f"{corpus.held_out_bytes / 1e6:.2f} MB; SHA-256 {corpus.sha256[:16]}",
        f"  model  {weights / 1e6:.2f} M weights: {s.depth} layers of width {s.width}, {heads}, "
        f"{s.context} bytes of context",
        f"  steps  {s.steps} of {s.batch} sequences ({s.steps * s.batch * s.context / 1e6:.2f} MB),"
        f" {s.dtype} on {s.device}, {s.threads} threads",
    ):
        say(console, line)
