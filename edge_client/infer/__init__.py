"""Inference on a device with a released model: loading, its self-test, predictions."""
