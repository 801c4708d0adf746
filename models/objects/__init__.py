"""Models given as objects: written into a run's folder as source and weights, from which any process builds them again."""
