"""The demonstrations `fedloop demo`, `demo-fleet`, `demo-loop` and `demo-serving`."""
