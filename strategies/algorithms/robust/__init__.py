"""Algorithms that bear malicious clients, one file each: the rule, and its options."""
