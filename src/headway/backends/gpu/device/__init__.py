"""Device functions that generated text and kernels call, alike in Triton and Gluon."""
