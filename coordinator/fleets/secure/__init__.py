"""Secure aggregation in simulations and on devices: clients of a round play the protocol in groups, and the engine gets the sum."""
