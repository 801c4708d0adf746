"""Codes that make an update, or the change of a model, small, one file each: the code, and its options."""
