"""Limits on requests, uploads and wrong tokens."""
