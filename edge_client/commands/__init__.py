"""The `fedloop-edge` command, one module per command group."""
