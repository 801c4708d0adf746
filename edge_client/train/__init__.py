"""Local training: one Trainer, three runtimes."""
