"""The fleets that carry tasks to clients: simulated clients, enrolled devices, and nodes of Flower."""
