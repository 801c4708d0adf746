"""The meaning of labels, for loading, training and scoring."""

PADDING = -1
"""A label that is ignored, in any task. The device's own copy is `edge_client.data.examples.PADDING`."""
