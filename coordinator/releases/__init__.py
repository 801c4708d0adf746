"""Signed releases: a TUF repository, signed offline, renewed and served online."""
