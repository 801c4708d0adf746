"""Measures served models: backends by size of batch, workers and threads, load on a server."""
