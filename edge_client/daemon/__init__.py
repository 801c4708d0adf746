"""The daemon: decides the next step, executes it, records it."""
