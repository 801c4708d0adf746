"""The audit log: a hash-chained record of every change that a person or a token makes, with a signed head."""
