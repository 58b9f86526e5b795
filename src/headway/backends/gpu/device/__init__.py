"""Device functions that generated functions and kernels call, in Triton and in Gluon."""
