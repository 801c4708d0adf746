"""The round engine: choose a cohort, check results, fold them, commit."""
