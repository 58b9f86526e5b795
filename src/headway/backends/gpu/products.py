"""How exact the products of the kernels are: of the factors' bits, the kinds of kernels follow."""

import torch


def bits_of(dtype: torch.dtype) -> int:
    """The bits of the factors of a product: 16; 19 for tf32; 32 for IEEE, without tensor cores."""
    return 19 if product_precision(dtype) == "tf32" else 8 * dtype.itemsize


def product_precision(dtype: torch.dtype) -> str:
    """float32 products as `torch.matmul` makes them: `torch.set_float32_matmul_precision`."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"
