"""Starts, limits and ends worker processes; the fork server."""
