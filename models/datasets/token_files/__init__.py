"""Token files: texts as token ids on disk, encoded once and mapped into memory."""
