"""One event loop for all requests of a process's `TestClient`s.

Outside a `with` block, Starlette's client starts a thread and an event loop for every request, and with the loop another thread
for the route: four milliseconds of five.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from anyio.from_thread import start_blocking_portal
from fastapi.testclient import TestClient


@pytest.fixture(scope="session", autouse=True)
def one_event_loop() -> Iterator[None]:
    with start_blocking_portal() as portal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(TestClient, "portal", portal)
        yield
