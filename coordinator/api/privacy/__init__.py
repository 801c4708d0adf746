"""The operator API of differential privacy: what runs and devices have spent."""
