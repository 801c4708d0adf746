"""Recovery from failures: checkpoints, elastic workers, preemption and hang detection."""
