"""Requests that Schemathesis generates from the OpenAPI documents of both APIs: whatever arrives, no answer is a failure of ours."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from pydantic import TypeAdapter
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance
from sqlalchemy import select

from coordinator.accounts import enrolment, enrolment_tokens
from coordinator.accounts.admin_token import read_admin_token
from coordinator.accounts.enrolment_tokens import TokenTerms
from coordinator.context.services import Services
from coordinator.db import tables
from coordinator.jobs.service import JobService
from coordinator.jobs.tables import jobs
from coordinator.runs.service import RunService
from coordinator.server.app import device_app, operator_app
from coordinator.server.metrics import Metrics
from edge_client.wire import device as wire
from edge_client.wire.statistics import StatisticsResult
from tests.support.arena import experiment
from tests.support.doorway import Device
from tests.support.fake_devices import answering
from tests.support.people import ORIGIN
from tests.support.services import services_in

pytestmark = pytest.mark.slow


MESSAGES = {
    "/enrol": wire.EnrolRequest,
    "/renew": wire.RenewRequest,
    "/checkin": wire.CheckIn,
    "/tasks/{task}/evaluation": wire.EvaluationResult,
    "/tasks/{task}/statistics": StatisticsResult,
    "/tasks/{task}/decline": wire.Decline,
    "/tasks/{task}/upload": wire.UploadStart,
}
"""What the device API reads by hand, with its own limits: its document does not have them."""
CHECKS = [not_a_server_error, response_schema_conformance]
QUICK, LARGE = 2, 100
"""Requests to each operation, of either kind: as the document says, and otherwise."""


class QueuedRuns(RunService):
    """Runs are created and never carried through, as between two starts of the coordinator."""

    def _start_thread(self, run: str) -> None: ...


class QueuedJobs(JobService):
    """Jobs are created and never run."""

    def _dispatch(self) -> None: ...


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with services_in(tmp_path / "home") as opened:
        opened.signals.close()  # streams of events, and check-ins that wait, end at once
        yield opened


@pytest.mark.parametrize("examples", [QUICK, pytest.param(LARGE, marks=pytest.mark.extended)])
def test_no_request_to_the_operator_api_makes_it_fail(services: Services, examples: int) -> None:
    runs = QueuedRuns(services, answering)
    queued = QueuedJobs(services)
    app = operator_app(services, runs, Metrics(services.database, services.signals), queued)
    runs.create(experiment(2))
    queued.create("simulation", {}, (), None, 0, "admin")
    enrolled(services, Device(services.settings.home))
    ids = ids_in(services)
    headers = {"Authorization": f"Bearer {read_admin_token(services.settings.home)}"}
    send_all(app, app.openapi(), ids, headers, examples)


@pytest.mark.parametrize("examples", [QUICK, pytest.param(LARGE, marks=pytest.mark.extended)])
def test_no_request_to_the_device_api_makes_it_fail(services: Services, examples: int) -> None:
    app = device_app(services, Metrics(services.database, services.signals))
    device = Device(services.settings.home)
    enrolled(services, device)
    peer = x509.load_pem_x509_certificate(device.certificate.encode()).public_bytes(Encoding.DER)

    async def with_certificate(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "state": {"peer_certificate": peer}}, receive, send)

    send_all(with_certificate, device_document(app), ids_in(services), {}, examples)


def enrolled(services: Services, device: Device) -> None:
    def work(at: Any) -> wire.Enrolled:
        _, token = enrolment_tokens.create_token(at, services.authority, TokenTerms(1), services.clock())
        enrol_request = wire.EnrolRequest(token, device.csr(), device.name)
        return enrolment.enrol(at, services.authority, services.settings, enrol_request, services.clock())

    answer = services.commit(work)
    device.id, device.certificate = answer.device, answer.certificate


def ids_in(services: Services) -> dict[str, list[str]]:
    """Of what there is, by the name that a path has for it."""
    ids = {"device": tables.devices, "run": tables.runs, "token": tables.tokens, "job": jobs}
    return {
        name: [
            str(each)
            for each in services.database.read(lambda at, table=table: list(at.scalars(select(table.c.id))))
        ]
        for name, table in ids.items()
    }


def ends_access(operation: Any) -> bool:
    """Sent last: a device that left is refused before anything else of it is read."""
    return bool(operation.path.endswith("/leave"))


def bounded(examples: int) -> settings:
    """The quick edition sends the same requests every time."""
    return settings(
        max_examples=examples, derandomize=examples == QUICK, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def device_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the device API, with the messages of `edge_client.wire.device` as bodies."""
    document = app.openapi()
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for path, message in MESSAGES.items():
        schema = TypeAdapter(message).json_schema(ref_template="#/components/schemas/{model}")
        components |= schema.pop("$defs", {})
        body = {"content": {"application/json": {"schema": schema}}, "required": True}
        document["paths"][wire.PREFIX + path]["post"]["requestBody"] = body
    return document


def send_all(
    app: Any,
    document: dict[str, Any],
    ids: Mapping[str, list[str]],
    headers: Mapping[str, str],
    examples: int,
) -> None:
    """Sends `examples` requests of each kind to every operation; half of those to a thing name one that is there."""
    schema = schemathesis.openapi.from_dict(document)
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    sent = Counter[str]()
    operations = sorted((found.ok() for found in schema.get_all_operations()), key=ends_access)
    for operation, mode in itertools.product(operations, modes):

        def send(case: Any, named: bool) -> None:
            if named:
                case.path_parameters |= {name: ids[name][0] for name in case.path_parameters if name in ids}
            answer = case.call(base_url=ORIGIN, headers=dict(headers), app=app)
            case.validate_response(answer, checks=CHECKS)
            sent[case.operation.label] += 1

        with suppress(Unsatisfiable):  # nothing is wrong where nothing is asked
            cases = operation.as_strategy(generation_mode=mode)
            bounded(examples)(given(case=cases, named=st.booleans())(send))()
    assert len(sent) == sum(map(len, document["paths"].values())), sent
