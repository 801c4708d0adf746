"""What is kept and shown of privacy."""
