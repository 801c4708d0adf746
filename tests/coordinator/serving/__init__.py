"""Inference serving."""
