"""The operator API: one module a resource."""
