"""Commands of administrators and auditors: the audit log."""
