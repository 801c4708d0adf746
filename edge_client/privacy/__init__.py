"""What a device does so that nobody sees its update: secure aggregation."""
