"""Long editions of tests, and the tests marked `extended`: `make test-long` runs them."""

from __future__ import annotations

import os

LONG = bool(os.environ.get("FEDLOOP_TEST_LONG"))
