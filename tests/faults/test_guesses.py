"""Who guesses tokens is told so a few times and then to wait; the right token gets in all the while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import urllib3

from coordinator.demos.local_fleet import LocalFleet, local_fleet
from coordinator.limits.rates import PER_ADDRESS
from edge_client.wire import device as wire
from tests.support.device_client import Answer, RawDevice, csr, fetched_ca, line, message, new_key, request

GUESSES = 150
LATER = 20
"""More that are answered as wrong, where a minute passes meanwhile."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, module_served_on: Mapping[str, str]
) -> Iterator[LocalFleet]:
    with local_fleet(tmp_path_factory.mktemp("fleet"), environment=module_served_on) as made:
        yield made


def test_wrong_admin_tokens_must_wait_and_the_right_one_passes(fleet: LocalFleet) -> None:
    with ThreadPoolExecutor(8) as pool:
        guessed = pool.map(lambda at: guess(fleet, at), range(GUESSES))
        right = [len(fleet.client.get("/devices")["devices"]) for _ in range(20)]
        answers = list(guessed)
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) == {401, 429}
    assert PER_ADDRESS <= statuses[401] <= PER_ADDRESS + LATER
    assert right == [0] * 20
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.json()["error"]["code"] == "too_many_guesses"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["connection"] == "close"
    log = fleet.coordinator.log.read_text()
    assert log.count("wrong_token") == statuses[401]
    assert "guess-" not in log


def guess(fleet: LocalFleet, number: int) -> urllib3.BaseHTTPResponse:
    """With a body, which is not read for strangers, and without one in turn."""
    headers = {"Authorization": f"Bearer guess-{number}"}
    url = f"{fleet.operator_url}/api/v1"
    if number % 2:
        return urllib3.request("GET", f"{url}/system", headers=headers, retries=False)
    return urllib3.request("POST", f"{url}/runs", headers=headers, json={"experiment": {}}, retries=False)


def test_wrong_enrolment_tokens_must_wait_and_the_right_one_enrols(fleet: LocalFleet, tmp_path: Path) -> None:
    token = fleet.client.post("/tokens", {})["token"]
    ca_pem, requested = fetched_ca(fleet.device_url), csr(new_key())
    form, ca_sha256, _ = token.split(".")

    def enrol(number: int) -> Answer:
        stranger = line(fleet.device_url, ca_pem)
        try:
            enrolment = wire.EnrolRequest(f"{form}.{ca_sha256}.guess-{number}", requested, "stranger")
            return stranger.send(request("POST", "/enrol", message(enrolment)))
        finally:
            stranger.close()

    answers = [enrol(number) for number in range(3 * PER_ADDRESS)]
    codes = Counter((answer.status, answer.code) for answer in answers)
    assert set(codes) == {(403, "token_unknown"), (429, "too_many_guesses")}
    assert PER_ADDRESS <= codes[(403, "token_unknown")] <= PER_ADDRESS + LATER
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert RawDevice.enrol(fleet.device_url, token, tmp_path / "raw").id
