"""Collectives on plain send and receive, and what they cost: how processes add up, spread and collect tensors.

A reference to learn from and measure with; trainings use torch's own. One module a family: `tree` (broadcast,
reduce, gather, scatter), `ring` (all-gather, reduce-scatter, all-reduce), `doubling`, `mesh`, `hierarchical`,
`pairwise` (all-to-all), all on `channel`, which counts what is sent; `cost` predicts it.
"""
