"""Device code that the forward and the backward kernels share."""
