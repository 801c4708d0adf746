"""What reports and the operator API say of a run's differential privacy."""
