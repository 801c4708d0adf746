"""Local training: one Trainer over LiteRT, PyTorch and TensorFlow."""
