"""Everything a device installs: training, the wire format."""
