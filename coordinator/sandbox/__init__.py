"""The sandbox of worker processes, which run user code: its policy, and how a process enters it."""
