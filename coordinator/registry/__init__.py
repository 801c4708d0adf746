"""The model registry: what was trained, compressed or released, under a name and a number, and what came from what."""
