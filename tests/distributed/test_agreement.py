"""Ranks that do not make the same call raise, all of them, and say which differs in what."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import headway as hw
from headway.distributed import Layout
from headway.errors import ArgumentError
from processes import run_ranks

LENGTH = 96


def every_field(world: int, rank: int) -> None:
    group = dist.group.WORLD
    other = rank == 1

    def call(layout=None, dtype=torch.float32, heads=2, mask=None, score=None, length=None, **more):
        layout = Layout.contiguous(LENGTH, group) if layout is None else layout
        size = layout.local if length is None else length
        q, k, v = (torch.randn(1, heads, size, 8, dtype=dtype) for _ in range(3))
        q.requires_grad_(more.pop("learns", False))
        return hw.attention(q, k, v, score, mask, layout=layout, **more)

    documents = torch.arange(LENGTH) // 40
    mine = torch.arange(LENGTH) // (39 if other else 40)
    wrong = {
        "the layout": {"layout": Layout.zigzag(LENGTH, group) if other else None},
        "dtype": {"dtype": torch.float64 if other else torch.float32},
        "the sizes": {"heads": 4 if other else 2},
        "the mask": {"mask": hw.causal() if other else None},
        "numbers that": {"mask": hw.sliding_window(7 + other)},
        "tensors that": {"mask": hw.document(mine)},
        "the score": {"score": hw.softcap(3.0) if other else hw.alibi(2)},
        "the seed": {"dropout": 0.1, "seed": 3 + rank},
        "scale": {"scale": 0.5 + other},
        "the plan": {
            "layout": Layout.contiguous(LENGTH, group).using("ring" if other else "heads")
        },
        "whether it trains": {"learns": other},
    }
    for field, given in wrong.items():
        with pytest.raises(ArgumentError, match=f"rank.*{field}"):
            call(**given)
    call(mask=hw.document(documents))  # and they go on as if nothing had been
    with pytest.raises(ArgumentError, match=r"48 of 96" if other else "rank 1.*local length"):
        call(length=LENGTH // 2 + other)
    with pytest.raises(ArgumentError, match="needs a seed"):
        call(dropout=0.1)


def one_fails(world: int, rank: int) -> None:
    """A rank that leaves: the others' exchange fails, long before the group's time is up."""
    group = dist.new_group(timeout=timedelta(seconds=25))
    layout = Layout.contiguous(LENGTH, group)
    q = torch.randn(1, 2, layout.local, 8)
    hw.attention(q, q, q, layout=layout)
    if rank == 1:
        dist.destroy_process_group()
        raise SystemExit(0)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        hw.attention(q, q, q, layout=layout)
    assert time.monotonic() - began < 20


def test_every_field(tmp_path):
    run_ranks(2, (every_field,), tmp_path)


def test_one_fails(tmp_path):
    run_ranks(2, (one_fails,), tmp_path)
