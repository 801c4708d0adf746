"""The meaning of labels, for loading, training and scoring."""

PADDING = -1
"""A class that is ignored, in any task. The device's own copy is `edge_client.data.examples.PADDING`."""

LEAST_QUANTITY = -5e29
"""Labels that are quantities are ignored below it; a batch is filled with `edge_client.data.examples.QUANTITY_PADDING`."""
