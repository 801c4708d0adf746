"""Formats on the wire and on disk: messages, named arrays, manifests, block hashes."""
