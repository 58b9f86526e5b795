"""Code generation: the graph of a score or mask becomes the source of device functions."""
