"""Reference collectives on plain send and receive, to learn from and measure with.

Trainings use torch's own. One module a family: `tree` (broadcast, reduce,
gather, scatter), `ring` (all-gather, reduce-scatter, all-reduce), `doubling`, `mesh`, `hierarchical`, `pairwise`
(all-to-all), all on `channel`, which counts what is sent; `cost` predicts it.
"""
