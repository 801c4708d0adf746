"""What a label means, to whoever loads, trains on or scores it."""

PADDING = -1
"""A label that counts for nothing, in any task. The device's own copy is `edge_client.train.trainer.PADDING`."""
