"""The data sets that Fedloop knows by name."""
