"""Federated algorithms as pure functions on named arrays; shared with all packages are hints for misspelled names."""
