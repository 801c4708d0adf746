"""Commands about privacy: attacks on a setting of one's own."""
