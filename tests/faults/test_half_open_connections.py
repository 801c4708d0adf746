"""Half-open connections, however many, keep out no device at another address."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faults.test_slow_sockets import open_files
from tests.support.arena import arena

HALF_OPEN = 2000
"""At 16 a second, more than two minutes of waiting for a device behind them."""
ELSEWHERE = "127.0.0.2"
CLIENT_HELLO = bytes.fromhex("160301020001000001fc0303")
"""The beginning of one."""


@pytest.mark.slow
def test_half_open_connections_keep_no_other_address_out(
    tmp_path: Path, served_on: Mapping[str, str]
) -> None:
    with ExitStack() as stack:
        stack.enter_context(open_files(4096))
        made = stack.enter_context(arena(tmp_path, environment=served_on))
        known, honest = made.enrol(2)
        assert known.check_in(made.checkin()).status == 200  # and stays connected
        place = urlsplit(made.fleet.device_url)
        for _ in range(HALF_OPEN):
            line = socket.create_connection(
                (str(place.hostname), place.port or 0), source_address=(ELSEWHERE, 0)
            )
            stack.callback(line.close)
            line.sendall(CLIENT_HELLO)
        for _ in range(20):
            assert honest.check_in(made.checkin()).status == 200
            honest.close()
        assert known.check_in(made.checkin()).status == 200
        assert not made.failures()
