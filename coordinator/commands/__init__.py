"""The `fedloop` command, one module per command group."""
