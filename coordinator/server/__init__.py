"""The process of `fedloop serve`: applications, HTTP, connection limits, logs and metrics."""
