"""Accounts for differential privacy: what rounds spend, and the ledger of what was spent."""
