"""The model registry: numbered versions under a name, and their lineage."""
