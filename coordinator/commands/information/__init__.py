"""Commands that inform: the documentation, the strategies, and what works on this machine."""
