"""Quantization: post-training, quantization-aware, mixed precision, codebooks, and packed weights."""
