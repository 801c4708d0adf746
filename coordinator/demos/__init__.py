"""The demonstrations `fedloop demo`, `demo-fleet` and `demo-loop`."""
