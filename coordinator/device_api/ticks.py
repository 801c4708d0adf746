"""Device ticks in the log: one line where a device stands otherwise than at its last check-in, none for every poll."""

from __future__ import annotations

from typing import Any

import structlog

_log = structlog.get_logger("fedloop.devices")


class Ticks:
    """What was last told of each device of this process. For one thread: that of the event loop."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, dict[str, Any]]] = {}

    def tell(self, device: str, state: str, **values: Any) -> None:
        """Logs the device's state, with those of the values that say something, unless that is what was told last."""
        said = {key: value for key, value in values.items() if value}
        if self._told.get(device) != (state, said):
            self._told[device] = (state, said)
            _log.info("device", device=device, state=state, **said)

    def forget(self, device: str) -> None:
        """It left, or was shut out."""
        self._told.pop(device, None)
