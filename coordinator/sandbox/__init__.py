"""The sandbox of worker processes, in which a user's code runs: what it may touch, and how a process enters it."""
