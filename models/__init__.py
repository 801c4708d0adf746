"""What a model is and how one is made."""
