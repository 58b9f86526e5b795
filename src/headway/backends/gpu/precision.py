"""Numbers of the kernels' float32 arithmetic, and how exact their products are."""

import torch

# Kernels keep scores in units of log 2: the hardware has exp2, and the factor log2(e) costs nothing
# where it joins the scale.
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
MAX_LSE = float(1 << 22)  # beyond it, lse in units of log 2 is rounded to so much as half of P


def bits_of(dtype: torch.dtype) -> int:
    """The bits of the factors of a product: 16; 19 for tf32; 32 for IEEE, without tensor cores."""
    return 19 if product_precision(dtype) == "tf32" else 8 * dtype.itemsize


def product_precision(dtype: torch.dtype) -> str:
    """float32 products as `torch.matmul` makes them: `torch.set_float32_matmul_precision`."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"
