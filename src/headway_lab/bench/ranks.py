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

from .case import FORWARD, Case
from .results import Result, environment
from .timing import Tick

TAG = "context parallel"
ONE_CARD = "one card"
PATIENCE = 300.0  # seconds for a case, whose kernels compile first


def measure(case: Case, device: str, repeats: int, tick: Tick) -> list[Result]:
    """Return the rows of a case: every contestant, forward and backward, and the memory."""
    ranks = RankProcesses.of(device)
    rows, error = ranks.ask({"case": case.name, "repeats": repeats})
    tick()
    results = [Result(**row) for row in rows]
    judged_results = [judged(case, r, results, len(ranks.processes)) for r in results]
    if error:
        judged_results.append(Result(case.name, "", "headway").not_run(error))
    return judged_results


def judged(case: Case, result: Result, results: list[Result], ranks: int) -> Result:
    """Return the result with the targets of Headway, next to the better of its peers."""
    if result.contestant != "headway" or result.gflops is None:
        return result
    direction, few = result.direction, ranks <= 2
    speeds = {r.contestant: r.gflops for r in results if r.direction == direction and r.gflops}
    required: dict[str, float] = {}
    if ONE_CARD in speeds:
        share = (0.97 if few else 0.95) if direction == FORWARD else (0.95 if few else 0.93)
        required[ONE_CARD] = (0.90 if few else 0.85) if "documents" in case.name else share
    if peers := [name for name in speeds if name.startswith("torch")]:
        long = 1.15 if direction == FORWARD else 1.2
        required[max(peers, key=speeds.__getitem__)] = 1.4 if case.length // ranks <= 8192 else long
    if not required:
        return result
    words = ", ".join(f">= {times}x {name}" for name, times in required.items())
    reached = all(result.gflops >= times * speeds[name] for name, times in required.items())
    return result.asked(words, reached)


class RankProcesses:
    """The processes of a group, restarted after one fails to answer."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.processes: list[subprocess.Popen] = []

    @staticmethod
    @lru_cache
    def of(device: str) -> "RankProcesses":
        """Return the processes of a device, shared by all cases."""
        processes = RankProcesses(device)
        atexit.register(processes.end)
        return processes

    def start(self) -> None:
        """Start one process per GPU; two on the CPU."""
        count = torch.cuda.device_count() if self.device == "cuda" else 2
        if count < 2:
            raise RuntimeError("one sequence over many cards wants two or more; here is one")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(count):
            question = {
                "rank": rank, "ranks": count, "device": self.device,
                "store": str(Path(self.folder.name) / "store"),
            }  # fmt: skip
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.ranks_process", json.dumps(question)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=open(Path(self.folder.name) / f"{rank}.txt", "w"),  # noqa: SIM115
                env=environment(),
            )  # fmt: skip
            self.processes.append(process)
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.read, args=[self.processes[0].stdout], daemon=True).start()

    def ask(self, question: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        """Return the first rank's rows, and an error if a process ends or no answer comes."""
        if not self.processes:
            try:
                self.start()
            except RuntimeError as error:
                return [], str(error)
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        rows: list[dict[str, Any]] = []
        until = time.monotonic() + PATIENCE
        while line := self.line(until):
            row = json.loads(line)
            if row is None:
                return rows, ""
            rows.append(row)
        last_lines = [(Path(self.folder.name) / f"{n}.txt").read_text().strip().splitlines()[-1:]
                for n in range(len(self.processes))]  # fmt: skip
        self.end()
        return rows, f"no more answers; the ranks' last words: {last_lines}"[:400]

    def line(self, until: float) -> str:
        """Return a line of the first rank, or "" if a process ends or `until` passes."""
        while time.monotonic() < until:
            with suppress(queue.Empty):
                return self.lines.get(timeout=1.0)
            if any(process.poll() is not None for process in self.processes):
                return ""
        return ""

    def read(self, output: IO[str]) -> None:
        """Queue the lines of a process as they come, and "" at its end."""
        for line in output:
            self.lines.put(line)
        self.lines.put("")

    def end(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []
