"""Differential privacy of a round: clipped updates, their sum, and the noise on it."""
