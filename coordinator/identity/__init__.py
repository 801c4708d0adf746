"""People: users, roles, passwords, sessions and access tokens."""
