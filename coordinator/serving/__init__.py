"""The front of inference serving: protocols, queues, workers' supervision. It imports no framework."""
