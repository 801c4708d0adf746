"""The operator API of people: users, projects and their members, access tokens."""
