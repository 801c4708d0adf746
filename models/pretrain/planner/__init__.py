"""Which plan to train by: measured on this machine, predicted for all plans, chosen and explained.

    probe -> profile -> search over plans (predict seconds, predict bytes) -> verify the best -> ranking and reasons

`probe` runs pieces of the model and short trainings and writes a `profile`; from there on all is arithmetic without
torch, `memory` and `pipeline` under `predict`, `search` above it, until `verify` measures the most promising plans and
chooses; `explain` says it in words. What runs in several processes, `probe` and `verify` have a `crew` do. A profile is JSON
that may be kept, edited, for another network or another processor, and planned with again. `scaling` adapts the options of
a training to a larger batch; `tune` looks for good ones.
"""
