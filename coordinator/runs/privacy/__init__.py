"""Differential privacy of a run: its plan and its ledger, in simulations and on devices."""
