"""The experiment file: its schema, its checks, and the plan of a run made from it."""
