"""Experiments as Flower apps: the app's folder, its ServerApp and its ClientApp."""
