"""Rollouts: brings a release to the fleet phase by phase, and rolls it back when a gate fails."""
