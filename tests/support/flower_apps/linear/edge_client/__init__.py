"""The app's clients."""
