"""PyTorch models as LiteRT artifacts."""
