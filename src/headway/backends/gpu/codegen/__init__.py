"""A score or mask graph becomes the text of device functions."""
