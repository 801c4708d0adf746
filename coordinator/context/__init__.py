"""Services that all parts of a serving coordinator share."""
