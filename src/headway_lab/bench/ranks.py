"""Context parallel: one sequence over all cards of this machine, next to one card that has as many
pairs, Headway's other plans, and what PyTorch has.

One process per card (on the CPU two, over gloo) is started for all cases of a run and answers case
after case (`ranks_process.py`). A case that gives no answer in time ends its processes; the next
one starts anew.
"""

import atexit
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import torch

from .case import BACKWARD, FORWARD, Case
from .machine import environment
from .results import NOT_RUN, Result
from .timing import Tick

TAG = "context parallel"
ONE_CARD = "one card"
PATIENCE = 300.0  # seconds for a case, whose kernels compile first


def measure(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """The rows of a case: every contestant, forward and backward, and the memory."""
    ranks = Ranks.of(device)
    rows, error = ranks.ask({"case": case.name, "repeats": repeats})
    tick()
    results = [Result(**row) for row in rows]
    found = [judged(case, r, results, len(ranks.processes)) for r in results]
    if error:
        found.append(Result(case.name, "", "headway", verdict=NOT_RUN, note=error))
    return found


def judged(case: Case, result: Result, results: list[Result], ranks: int) -> Result:
    """With what is asked of Headway, next to the better of its peers."""
    if result.contestant != "headway" or result.gflops is None:
        return result
    speed = {
        r.contestant: r.gflops
        for r in results
        if r.direction == result.direction and r.gflops is not None
    }
    local = "documents" in case.name
    few = ranks <= 2
    least = {FORWARD: 0.97, BACKWARD: 0.95} if few else {FORWARD: 0.95, BACKWARD: 0.93}
    if local:
        least = dict.fromkeys(least, 0.90 if few else 0.85)
    asked = []
    if ONE_CARD in speed:
        asked.append((least[result.direction], ONE_CARD, speed[ONE_CARD]))
    peers = {name: x for name, x in speed.items() if name.startswith("torch")}
    if peers:
        best = max(peers, key=peers.__getitem__)
        times = 1.4 if case.length // ranks <= 8192 else {FORWARD: 1.15, BACKWARD: 1.2}[
            result.direction
        ]  # fmt: skip
        asked.append((times, best, peers[best]))
    if not asked:
        return result
    words = ", ".join(f">= {times}x {name}" for times, name, _ in asked)
    return result.asked(words, all(result.gflops >= times * x for times, _, x in asked))


class Ranks:
    """Processes that form a group, as long as they answer."""

    def __init__(self, device: str) -> None:
        self.device, self.processes = device, []  # type: ignore[var-annotated]

    @staticmethod
    @lru_cache
    def of(device: str) -> "Ranks":
        """Those of a device, for all cases."""
        made = Ranks(device)
        atexit.register(made.end)
        return made

    def start(self) -> None:
        """One process per card; two on the CPU."""
        count = torch.cuda.device_count() if self.device == "cuda" else 2
        if count < 2:
            raise RuntimeError("one sequence over many cards wants two or more; here is one")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(count):
            asked = {
                "rank": rank, "ranks": count, "device": self.device,
                "store": str(Path(self.folder.name) / "store"),
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.ranks_process", json.dumps(asked)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=open(Path(self.folder.name) / f"{rank}.txt", "w"),  # noqa: SIM115
                env=environment(),
            )  # fmt: skip
            self.processes.append(process)
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.read, args=[self.processes[0].stdout], daemon=True).start()

    def ask(self, question: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """The rows that the first rank says; and an error, where one ends or no more come in
        time."""
        if not self.processes:
            try:
                self.start()
            except RuntimeError as error:
                return [], str(error)
        for process in self.processes:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        rows: list[dict[str, Any]] = []
        until = time.monotonic() + PATIENCE
        while line := self.line(until):
            row = json.loads(line)
            if row is None:
                return rows, ""
            rows.append(row)
        said = [(Path(self.folder.name) / f"{n}.txt").read_text().strip().splitlines()[-1:]
                for n in range(len(self.processes))]  # fmt: skip
        self.end()
        return rows, f"no more answers; the ranks' last words: {said}"[:400]

    def line(self, until: float) -> str:
        """A line of the first rank; empty if it ends, another one ends, or it is later than
        `until`."""
        while time.monotonic() < until:
            with suppress(queue.Empty):
                return self.lines.get(timeout=1.0)
            if any(process.poll() is not None for process in self.processes):
                return ""
        return ""

    def read(self, output: IO[str]) -> None:
        """Take the lines of a process as they come; an empty one is the end."""
        for line in output:
            self.lines.put(line)
        self.lines.put("")

    def end(self) -> None:
        """Kill what is left of them."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []
