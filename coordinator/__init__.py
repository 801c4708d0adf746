"""The server; shared here are its settings, errors, certificate fields and model references."""
