"""Pretraining in the datacenter: one training loop for every parallel plan."""
