"""Commands that prepare training data: texts as token files."""
