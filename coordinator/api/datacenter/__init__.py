"""Routes of the operator API for work on the coordinator's own machine: jobs."""
