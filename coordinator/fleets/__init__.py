"""The Fleet protocol and its kinds: whatever carries tasks to clients."""
