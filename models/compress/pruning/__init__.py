"""Pruning of weights and channels, and low-rank factorization."""
