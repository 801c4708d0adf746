"""Serves predictions to other programs on the device."""
