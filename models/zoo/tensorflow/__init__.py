"""Keras models, and TensorFlow twins of the shipped architectures."""
