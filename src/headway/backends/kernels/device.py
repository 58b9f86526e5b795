"""Triton launches on the current device: make it the tensors' where it is another."""

from contextlib import AbstractContextManager, nullcontext

import torch


def elsewhere(device: torch.device) -> bool:
    """Whether the current device is another. (`torch.cuda.current_device` also looks whether CUDA
    has been started, as it has where tensors are, at five times the price.)"""
    return device.type == "cuda" and device.index != torch._C._cuda_getDevice()


def on(device: torch.device) -> AbstractContextManager:
    """Inside, launches go to `device`."""
    return torch.cuda.device(device) if elsewhere(device) else nullcontext()
