"""Device functions that generated text and kernels call, in Triton and in Gluon."""
