"""The workers of inference serving: backends that compute, and the processes that hold them."""
