"""Requests that never end cost a coordinator neither memory nor time, on either port."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.support.arena import Arena, arena
from tests.support.stranger import ENDLESS, Port, flooded

PATHS = {"device": "/device/v1/enrol", "operator": "/api/v1/tokens"}
MAX_BYTES = 48 * 2**20
SECONDS = 20.0
STATUS = {"url": {414}, "pipelined": {0, 401, 405}}
"""0: the answers were cut off. 401 without a token comes before the body, so before its trailers."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, module_served_on: Mapping[str, str]) -> Iterator[Arena]:
    with arena(tmp_path_factory.mktemp("served"), environment=module_served_on) as made:
        made.enrol(1)
        yield made


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("port", PATHS)
def test_a_request_without_end_is_refused_and_cut_off(served: Arena, port: str, kind: str) -> None:
    url = served.fleet.device_url if port == "device" else served.fleet.operator_url
    rest = served.memory().resident
    ending = flooded(Port(url), ENDLESS[kind](PATHS[port]), MAX_BYTES, SECONDS)
    assert ending.is_closed and ending.sent_bytes < MAX_BYTES
    assert ending.status in STATUS.get(kind, {431, 401} if port == "operator" else {431})
    assert served.memory().resident - rest < 32e6
    assert served.raw[0].check_in(served.checkin()).status == 200
    assert not served.failures()
