"""Training input: sources of examples, each process's share of a batch, prefetching."""
