"""Commands that sign in, and manage users and access tokens."""
