"""Parallelism: over rows in `data`, over params in `model`."""
