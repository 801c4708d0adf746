"""Device states in the log: one line when a device's state has changed since its last check-in, none otherwise."""

from __future__ import annotations

from typing import Any

import structlog

_log = structlog.get_logger("fedloop.devices")


class DeviceLog:
    """The last logged state of each device. Not thread-safe: only the event loop's thread may call it."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, dict[str, Any]]] = {}

    def log(self, device: str, state: str, **values: Any) -> None:
        """Logs the device's state and all truthy values, unless the last line of the device was the same."""
        present = {key: value for key, value in values.items() if value}
        if self._last.get(device) != (state, present):
            self._last[device] = (state, present)
            _log.info("device", device=device, state=state, **present)

    def forget(self, device: str) -> None:
        """Drops the state of a device that left or was revoked."""
        self._last.pop(device, None)
