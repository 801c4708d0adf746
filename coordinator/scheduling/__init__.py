"""Decides which device works on which run, and when it checks in again."""
