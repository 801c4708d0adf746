"""Sign-in at an OpenID provider: its endpoints and keys, the ID token, and the role it gives."""
