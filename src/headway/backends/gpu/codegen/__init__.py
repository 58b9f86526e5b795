"""Code generation: the graph of a score or mask becomes the text of device functions."""
