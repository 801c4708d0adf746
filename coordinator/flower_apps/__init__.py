"""Flower apps: reads the `pyproject.toml` of one and runs its ServerApp and ClientApp unmodified in processes of this machine."""
