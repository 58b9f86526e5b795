"""The library's own masks and scores, each a value with its formula."""
