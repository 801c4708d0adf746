"""The device API, one module per step of a device."""
