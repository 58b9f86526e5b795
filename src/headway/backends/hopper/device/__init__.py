"""What the forward and backward kernels share, all of it device code."""
