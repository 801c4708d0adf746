"""Signed releases: a repository of The Update Framework, made offline, kept fresh and served online."""
