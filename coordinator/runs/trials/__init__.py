"""Trials of a simulation: attacks on it, and models that single clients train."""
