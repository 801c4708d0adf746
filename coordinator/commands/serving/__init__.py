"""`fedloop serving`: predictions of the registry's models for programs."""
