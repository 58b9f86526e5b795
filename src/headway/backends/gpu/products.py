"""The precision of the kernels' products. Tile sizes follow from the bits of the operands."""

import torch


def bits_of(dtype: torch.dtype) -> int:
    """Return the bits of a product's operands: 16, 19 (tf32) or 32 (IEEE, without tensor cores)."""
    return 19 if product_precision(dtype) == "tf32" else 8 * dtype.itemsize


def product_precision(dtype: torch.dtype) -> str:
    """Return "tf32" if `torch.set_float32_matmul_precision` allows it, else "ieee"."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"
