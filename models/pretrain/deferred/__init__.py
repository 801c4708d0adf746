"""Deferred initialisation: a module is created without memory, and a process materialises only its shards."""
