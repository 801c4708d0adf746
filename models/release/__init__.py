"""Builds release folders (manifest, golden answers) and verifies them on every runtime."""
