"""People: users, projects, roles, passwords, sessions and access tokens."""
