"""The device API: what enrolled devices call. One module a step of theirs."""
