"""Model updates over the air: signed releases, two slots a model, and a way back."""
