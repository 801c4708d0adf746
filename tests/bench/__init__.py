"""Benchmarks: `make bench`. Ratios measured interleaved in one run, printed, and written as JSON."""
