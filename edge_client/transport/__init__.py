"""The device's HTTPS connection to its coordinator, and its identity."""
