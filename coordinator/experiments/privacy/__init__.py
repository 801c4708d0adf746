"""Privacy of a run: the table `[privacy]`, its defaults, and what it does not go with."""
