"""Installs signed model releases in two slots per model and rolls back a bad one."""
