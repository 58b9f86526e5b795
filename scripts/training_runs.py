"""The long runs of docs/training.md: `python scripts/training_runs.py ARM... --out FOLDER`.

Trains one arm after the other in one process, which reads the text once, and writes FOLDER/ARM.jsonl
after each: small enough to be committed (bench/results/runs/). The first line says what was run, on
what, and how long it took; every other line is the mean over some steps. FOLDER/corpus.csv lists the
text. An arm's settings are those of `headway train` with the options that --list prints.
"""

import argparse
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import headway
from headway.errors import HeadwayError
from headway_lab.recipe.corpus import Corpus, load_corpus
from headway_lab.recipe.presets import preset
from headway_lab.recipe.train import TrainConfig, train

LINES = 200  # of an arm's file
WARM_UP = 20  # steps that compile, not counted into tokens per second
SCALINGS = ("logits", "query", "init", "none")
RATES = {"adamw": (0.0003, 0.001, 0.003, 0.01), "adafactor": (0.01, 0.03, 0.1)}


def arms() -> dict[str, tuple[str, dict[str, Any]]]:
    """Of every arm its preset, and what differs from it."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for seed in (0, 1):
        found[f"sdpa-{seed}"] = "60m", {"implementation": "sdpa", "seed": seed}
        found[f"headway-{seed}"] = "60m", {"seed": seed}
    found["documents"] = "60m", {"mask": "documents"}
    found["documents-2-gpus"] = "60m", {"mask": "documents", "devices": 2}
    found["softcap"] = "60m", {"softcap": 50.0}
    for attention in ("gqa", "mla"):
        for seed in (0, 1):
            found[f"explode-{attention}-{seed}"] = (
                "60m-explode", {"attention": attention, "seed": seed},
            )  # fmt: skip
        found[f"explode-{attention}-clip"] = (
            "60m-explode", {"attention": attention, "qk_clip_tau": 100.0},
        )  # fmt: skip
    for optimizer, rates in RATES.items():
        for rate in rates:
            for scaling in SCALINGS:
                found[f"scaling-{scaling}-{optimizer}-{rate:g}"] = (
                    "19m", {"scaling": scaling, "optimizer": optimizer, "lr": rate},
                )  # fmt: skip
    return found


def config_of(arm: str) -> TrainConfig:
    name, changes = arms()[arm]
    return replace(preset(name), **changes)


def command_of(arm: str) -> str:
    """The arm as a user writes it."""
    name, changes = arms()[arm]
    return " ".join(["headway train --preset", name, *options(changes)])


def options(changes: dict[str, Any]) -> list[str]:
    """Settings as `headway train` takes them."""
    return [f"--{key.replace('_', '-')}={value}" for key, value in changes.items()]


def summary(run: Path, about: dict[str, Any]) -> str:
    """The file of an arm, from its metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    description = json.loads((run / "config.json").read_text())
    del description["corpus"]["held_out"]["names"]
    rates = [r["tokens_per_second"] for r in records[WARM_UP:] or records]
    head = about | {
        "tokens": sum(r["tokens"] for r in records),
        "tokens_per_second": round(statistics.median(rates)),
        "seconds_training": round(records[-1]["seconds"], 1),
        **{key: description[key] for key in ("corpus", "versions", "config")},
    }
    size = max(1, -(-len(records) // LINES))
    lines = [head]
    for start in range(0, len(records), size):
        lines.append(_mean(records[start : start + size]))
    return "".join(json.dumps(line) + "\n" for line in lines)


def _mean(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One line for some steps: means, and the largest of the logits in every layer."""
    last = records[-1]
    layers = [[max(r["max_logit"][n]) for r in records] for n in range(len(last["max_logit"]))]
    line = {
        "step": last["step"],
        "tokens": last["step"] * last["tokens"],
        "seconds": round(last["seconds"], 2),
        "loss": round(statistics.fmean(r["loss"] for r in records), 5),
        "bits_per_byte": round(statistics.fmean(r["bits_per_byte"] for r in records), 5),
        "tokens_per_second": round(statistics.median(r["tokens_per_second"] for r in records)),
        "max_logit": [round(max(layer), 2) for layer in layers],
    }
    if "clipped_heads" in last:
        line["clipped_heads"] = sum(r["clipped_heads"] for r in records)
    looks = [r for r in records if "held_out_bits_per_byte" in r]
    if looks:
        line["held_out_bits_per_byte"] = round(looks[-1]["held_out_bits_per_byte"], 5)
        line["held_out_bytes"] = looks[-1]["held_out_bytes"]
    return line


def run(arm: str, config: TrainConfig, corpus: Corpus, about: dict[str, Any], out: Path) -> None:
    began = time.perf_counter()
    assert config.name is not None
    folder = config.runs / config.name
    if config.devices == 1:
        train(config, console=Console(soft_wrap=True), corpus=corpus)
    else:  # processes of their own
        given = {k: v for k, v in vars(config).items() if v != getattr(TrainConfig, k)}
        command = [sys.executable, "-m", "headway.cli", "train", *options(given)]
        subprocess.run(command, check=True)
    about = {"arm": arm, "command": command_of(arm)} | about
    about["seconds"] = round(time.perf_counter() - began, 1)
    (out / f"{arm}.jsonl").write_text(summary(folder, about))
    (out / "corpus.csv").write_text((folder / "corpus.csv").read_text())
    print(f"{arm}: {about['seconds']} s", flush=True)


def machine(commit: str | None, device: str) -> dict[str, Any]:
    if commit is None:
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"triton": None, "cuda": torch.version.cuda}
    if device == "cuda":
        import triton

        versions["triton"] = triton.__version__
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "commit": commit,
        "source": source(),
        "date": time.strftime("%Y-%m-%d"),
        **versions,
    }


def source() -> str:
    """A SHA-256 of the code that runs, whatever --commit says."""
    root = Path(headway.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arms", nargs="*", help="names, or beginnings of names")
    parser.add_argument("--out", type=Path, default=Path("bench/results/runs"))
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the whole runs")
    parser.add_argument("--commit", help="of the code, where there is no git")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="for a try-out")
    parser.add_argument("--list", action="store_true", help="print every arm's command")
    asked = parser.parse_args()
    chosen = [
        arm
        for name in asked.arms
        for arm in ([name] if name in arms() else filter(lambda a, n=name: a.startswith(n), arms()))
    ]
    if asked.list or not asked.arms or not chosen:
        print("\n".join(f"{arm:32} {command_of(arm)}" for arm in chosen or arms()))
        print(f"source {source()}")
        return 0 if asked.list else 2
    changes = {name: json.loads(value) for name, value in (s.split("=", 1) for s in asked.set)}
    changes = {n: Path(v) if n == "corpus" else v for n, v in changes.items()}
    asked.out.mkdir(parents=True, exist_ok=True)
    about, corpus = None, None
    for arm in chosen:
        config = replace(config_of(arm), **changes, name=arm, runs=asked.runs)
        if corpus is None:
            began = time.perf_counter()
            corpus = load_corpus(config.corpus, config.text)
            print(f"text: {time.perf_counter() - began:.1f} s", flush=True)
            about = machine(asked.commit, config.device)
        try:
            run(arm, config, corpus, about, asked.out)
        except (HeadwayError, subprocess.CalledProcessError) as error:  # the others go on
            print(f"{arm}: {error}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
