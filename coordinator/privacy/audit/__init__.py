"""The privacy audit: attacks on an experiment of one's own, and what its defences change."""
