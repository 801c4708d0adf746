"""Data parallelism: sharding, gradient compression and local updates."""
