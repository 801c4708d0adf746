"""Worker processes: they load data, build models, train simulated clients and evaluate."""
