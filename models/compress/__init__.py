"""From a large trained model to a small one: distil, quantize."""
