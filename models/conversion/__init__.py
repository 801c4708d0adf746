"""Converts PyTorch and Keras models to LiteRT artifacts for training."""
