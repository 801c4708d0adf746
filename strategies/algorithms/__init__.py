"""Federated algorithms by name, one file each: a dataclass of its options that builds the `Strategy`."""
