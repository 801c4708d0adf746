"""The device's part in secure aggregation."""
