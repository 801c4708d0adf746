"""Memory and CPU time of the server's processes, and one budget of memory for them."""
