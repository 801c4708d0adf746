"""Commands of inference serving: start a server, deploy and scale models, show their status, measure them."""
