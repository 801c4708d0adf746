"""Bytes: params files, messages, the artifact manifest."""
