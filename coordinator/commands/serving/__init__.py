"""Commands of inference serving: start a server, deploy and scale models, and show their status."""
