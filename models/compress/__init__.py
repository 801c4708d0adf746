"""Compresses a trained model step by step until it fits a device."""
