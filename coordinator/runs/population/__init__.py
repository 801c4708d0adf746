"""The clients of a simulation: their names, rows, runtimes and faults, and the device class of each; what the classes of devices train."""
