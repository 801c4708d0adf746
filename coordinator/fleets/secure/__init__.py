"""Secure aggregation in simulations: clients of a round play the protocol in groups, and the engine gets the sum."""
