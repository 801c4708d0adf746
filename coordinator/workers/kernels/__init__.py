"""Ways of training simulated clients in PyTorch that are faster than one client after the other in plain steps."""
