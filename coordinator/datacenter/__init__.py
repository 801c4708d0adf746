"""Datacenter jobs: pretraining, compression, export."""
