"""The plan of the GPU kernel of inference: what several threads may do with one."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from headway.backends.gpu.inference import plan as plans


def test_threads_that_meet_too_little_shared_memory_all_use_the_next_config(monkeypatch):
    """A config that one thread finds too large says nothing about the config after it."""
    both = threading.Barrier(2, timeout=60)
    launched: list[tuple[int, int]] = []

    def configure(self, number):
        def launcher(tensors, _):
            *_, partials, _ = tensors
            if not number:
                both.wait()
                raise OutOfResources(2, 1, "shared memory")
            launched.append((number, len(partials)))

        return plans.ConfiguredKernel(number, 64, 10 * (1 + number), launcher)

    monkeypatch.setattr(plans.Plan, "configure", configure)
    plan = plans.Plan.__new__(plans.Plan)
    vars(plan).update(
        configs=(None, None), constants={"byte_format": None}, device=torch.device("cpu"),
        spec=SimpleNamespace(tiles=None), partial_size=3, d=16, dv=16, tile_rows=16,
    )  # fmt: skip
    plan.configured = plan.configure(0)
    captured = SimpleNamespace(tensors=(), floats=())
    call = SimpleNamespace(q=None, k=None, v=None, kv=None, sink=None, captured=captured)
    threads = [threading.Thread(target=plan.launch, args=(call, [1], *[None] * 4)) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert launched == [(1, 2 * 20 * 3)] * 2  # as many partial results as its CTAs write
