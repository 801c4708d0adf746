"""Algorithms whose server has data of its own, one file each: what it does with them, and the options."""
