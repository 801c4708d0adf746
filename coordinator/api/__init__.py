"""The operator API, one module per resource."""
