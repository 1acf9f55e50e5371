"""A small mixture of experts on an emulated cluster, from text that comes with Python."""
