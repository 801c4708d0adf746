"""A fleet with relays, as real processes: `fedloop-edge relay` beside the daemons, each with a folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.demos.local_fleet import Daemon, LocalFleet, enrol, free_address
from tests.support.waiting import wait_until

_EDGE = str(Path(sys.executable).parent / "fedloop-edge")


@dataclass
class RelayedFleet(LocalFleet):
    """`relays`: their daemons by name; `addresses`: where devices reach them."""

    relays: dict[str, Daemon] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    def add_relay(self, name: str) -> str:
        """Enrols and starts a relay; returns its id once it serves."""
        folder = self.folder / "devices" / name
        folder.mkdir()
        environment = {
            **self.environment,
            "FEDLOOP_EDGE_NAME": name,
            "FEDLOOP_EDGE_STATE_DIR": str(folder / "state"),
        }
        token = self.client.post("/tokens", {"relay_names": ["127.0.0.1"]})["token"]
        enrol(name, [_EDGE, "enroll", self.device_url, token], environment)
        self.addresses[name] = free_address()
        command = [_EDGE, "relay", "--listen", self.addresses[name]]
        self.relays[name] = Daemon(command, self.folder / "logs" / f"{name}.log", environment)
        self.relays[name].start()
        wait_until(lambda: "serves devices at" in self.relays[name].log.read_text())
        return self.ids()[name]

    def url(self, relay: str) -> str:
        return f"https://{self.addresses[relay]}"

    def kill(self) -> None:
        for each in self.relays.values():
            if each.is_running():
                each.kill()
        super().kill()


@contextmanager
def relayed_fleet(
    folder: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[RelayedFleet]:
    """A running coordinator without devices; kills all processes at the end."""
    fleet = RelayedFleet(folder, flags, environment or {})
    try:
        fleet.serve()
        yield fleet
    finally:
        fleet.kill()
