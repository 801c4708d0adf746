"""What outlives a process: checkpoints, the curve, and starting again where processes die, leave or hang."""
