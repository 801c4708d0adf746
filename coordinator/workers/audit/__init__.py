"""What workers do in a privacy audit: updates of single clients, attacks on them, and the losses of single rows."""
