"""Federated algorithms as pure functions on named arrays."""
