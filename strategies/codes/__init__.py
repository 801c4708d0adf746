"""Codes that make a client's update small, one file each: the code, and its options."""
