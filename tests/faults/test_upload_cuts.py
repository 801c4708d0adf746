"""An upload whose line is cut: the daemon goes on where the coordinator has it, and sends nothing twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlsplit

import pytest

from coordinator.demos.local_fleet import LocalFleet, local_fleet
from tests.support import noop
from tests.support.proxies import Line

pytestmark = pytest.mark.slow

MODEL_BYTES = 10_000_000
OTHER_BYTES = 1_000_000
"""More than all that is sent besides the result: handshakes, check-ins for minutes, the frames of TLS, and what a
line that breaks takes with it."""


@pytest.fixture(scope="module")
def wired(
    tmp_path_factory: pytest.TempPathFactory, module_served_on: Mapping[str, str]
) -> Iterator[tuple[LocalFleet, Line]]:
    """A coordinator, and a device that reaches it by a line."""
    folder = tmp_path_factory.mktemp("wired")
    with local_fleet(folder, environment=module_served_on) as fleet, _line(fleet) as line:
        noop.add_device(fleet, "a", url=line.url).start()
        yield fleet, line


EXTENDED = [pytest.param(percent, marks=pytest.mark.extended) for percent in (10, 90)]


@pytest.mark.parametrize("percent", [50, *EXTENDED])
def test_a_cut_upload_goes_on_where_it_was_cut(wired: tuple[LocalFleet, Line], percent: int) -> None:
    fleet, line = wired
    line.cut_after(MODEL_BYTES * percent // 100)
    run = noop.start(fleet, noop.experiment(MODEL_BYTES, rounds=1, clients=1))

    sent = MODEL_BYTES * percent // 100 - OTHER_BYTES
    _until(lambda: line.is_cut)
    _until(lambda: _held_bytes(fleet) >= sent)
    held, before = _held_bytes(fleet), line.bytes_up
    assert held < MODEL_BYTES * percent // 100

    line.mend()
    (only,) = noop.finish(fleet.client, run)
    assert only["accepted"] == 1
    assert line.bytes_up - before <= only["bytes_up"] - held + OTHER_BYTES


@pytest.mark.extended
def test_an_upload_cut_again_and_again_arrives(wired: tuple[LocalFleet, Line]) -> None:
    fleet, line = wired
    before = line.bytes_up
    line.cut_after(MODEL_BYTES // 5)
    run = noop.start(fleet, noop.experiment(MODEL_BYTES, rounds=1, clients=1))
    for _ in range(3):
        _until(lambda: line.is_cut)
        line.mend()
        line.cut_after(MODEL_BYTES // 5)
    _until(lambda: line.is_cut)
    line.mend()
    (only,) = noop.finish(fleet.client, run)
    assert only["accepted"] == 1
    # What was on its way when a line was cut may have to be sent once more, and no more than that.
    assert line.bytes_up - before <= only["bytes_up"] + 4 * OTHER_BYTES + 4 * 2**20


def _line(fleet: LocalFleet) -> Line:
    parts = urlsplit(fleet.device_url)
    assert parts.hostname is not None and parts.port is not None
    return Line((parts.hostname, parts.port))


def _held_bytes(fleet: LocalFleet) -> int:
    """Of the only upload, how much the coordinator has on disk."""
    return sum(path.stat().st_size for path in (fleet.home / "uploads").glob("*.part"))


def _until(holds: Callable[[], bool], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "what was waited for does not happen"
        time.sleep(0.02)
