"""Runs, in simulation and on devices: preparation, rounds, completion."""
