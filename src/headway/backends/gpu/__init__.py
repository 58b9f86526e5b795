"""The common part of the backends that compile kernels: code generation, launches, preprocess.

Importing it loads no Triton.
"""

from ...types import Spec
from .precision import MAX_LSE


def limits(spec: Spec) -> list[str]:
    """Return the limits of kernels that compute T - lse in float32, in units of log 2."""
    if spec.score is None:
        return []
    return [
        f"a query whose largest score is beyond +-{MAX_LSE:,.0f} (-1e9 for every key, say) gets no "
        "gradients, and beyond +-1e8 its out may be wrong or NaN: drop such keys by the mask or by "
        "-inf, or use a smaller minimum, such as -1e4; at +-x, its gradients are off by up to "
        f"x / {MAX_LSE:,.0f} of themselves"
    ]
