"""Quantization: post-training, quantization-aware, mixed precision and codebooks."""
