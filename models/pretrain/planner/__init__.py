"""Chooses a parallel plan: measures this machine, predicts every plan, verifies and explains the best.

    probe -> profile -> search over plans (predict seconds, predict bytes) -> verify the best -> ranking and reasons

`probe` runs pieces of the model and short trainings and writes a `profile`. From there on everything is arithmetic
without torch, `memory` and `placement` under `predict`, `search` above it, until `verify` measures the most promising
plans and chooses one; `explain` describes the choice. `probe` and `verify` run multi-process work on `bench_workers`. A
profile is JSON that may be kept, edited for another network or processor, and planned with again. `pieces` gives params to
one part of the model at a time, `profile_cache` keeps what was measured, `phases` times everything. `scaling` adapts the
options of a training to a larger batch; `tune` searches for good ones.
"""
