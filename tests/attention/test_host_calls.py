"""The host's work in a repeated call, counted in calls of Headway's functions and of functions in C
that these call: a count is exact where a time is noisy."""

import os
import sys

import pytest
import torch

import headway as hw

PACKAGE = os.path.dirname(hw.__file__) + os.sep
Q = torch.randn(1, 4, 16, 8)
TRAINED = Q.clone().requires_grad_()
CAUSAL, WINDOW, BIAS = hw.causal(), 5, torch.randn(4, 32)


def near(window):
    return lambda b, h, i, j: i - j < window


def biased(bias):
    return lambda s, b, h, i, j: s + bias[h, i - j + 16]


MASK, SCORE = near(WINDOW), biased(BIAS)
COMPILED = torch.compile(lambda q: hw.attention(q, q, q, mask=MASK), backend="eager")
CALLS = {
    "plain": (lambda: hw.attention(Q, Q, Q), 31),
    "causal": (lambda: hw.attention(Q, Q, Q, mask=CAUSAL), 32),
    "trained": (lambda: hw.attention(TRAINED, Q, Q), 40),
    "mask": (lambda: hw.attention(Q, Q, Q, mask=MASK), 167),
    "score": (lambda: hw.attention(Q, Q, Q, SCORE), 271),
    "statistics": (lambda: hw.attention_with_stats(Q, Q, Q), 134),
    "compiled": (lambda: COMPILED(Q), 140),
}


def calls_of_headway(fn):
    count = 0

    def event(frame, kind, arg):
        nonlocal count
        if kind in ("call", "c_call"):
            count += frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(event)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", CALLS)
def test_calls_on_the_host(name):
    fn, most = CALLS[name]
    for _ in range(3):
        fn()
    assert calls_of_headway(fn) <= most
