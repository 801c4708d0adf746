"""Loads a released model, self-tests it and predicts with it."""
