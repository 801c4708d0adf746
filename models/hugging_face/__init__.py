"""Checkpoints in Hugging Face's layout: config.json and safetensors, read into our models and written from them."""
