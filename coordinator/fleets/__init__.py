"""The two fleets that carry tasks to clients: simulated clients and enrolled devices."""
