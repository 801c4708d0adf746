"""Predicts what a run will take before it begins: time, memory and bytes, from a calibration of a few rounds."""
