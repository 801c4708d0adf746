"""Deferred initialisation: a module created without memory, and values for the shards of a process."""
