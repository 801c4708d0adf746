"""OpenAI's completions and models, for any inference service."""
