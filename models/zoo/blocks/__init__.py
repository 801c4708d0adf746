"""Parts of large transformers, and what differs between published ones."""
