"""The backward kernels: their warps, the reduction of dQ, and the plans that launch them."""
