"""Rollouts: a release on its way through the fleet, phase by phase, and back where it proves bad."""
