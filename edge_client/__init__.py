"""Everything a device installs; shared here are its configuration, state, outbox, ledger and errors."""
