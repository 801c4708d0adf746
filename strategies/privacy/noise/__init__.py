"""Noise of differential privacy: where its randomness comes from, and how it is distributed."""
