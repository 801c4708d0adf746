"""The round engine: choose a cohort, check results, fold, commit."""
