"""The experiment file: its schema, its checks and its defaults."""
