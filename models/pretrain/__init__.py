"""The datacenter tier: the public part of the data, many ranks, one set of params."""
