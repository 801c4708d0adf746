"""Files in the home of a server."""

from __future__ import annotations

TOKEN_FILE = "management.token"
ADDRESS_FILE = "serving.json"
DEPLOYMENTS_FILE = "deployments.json"
PROFILES = "profiles"
