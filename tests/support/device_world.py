"""A coordinator's device API on loopback, without TLS, and devices that talk to it as daemons do.

Who calls is what the `x-device` header says, in place of a certificate; everything else is the real thing.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn
from fastapi import FastAPI, Request
from sqlalchemy import insert, update

from coordinator.accounts.certificate_authority import Authority
from coordinator.api import participation
from coordinator.api.deps import require_permission
from coordinator.context.services import Services
from coordinator.context.signals import Signals
from coordinator.db.store import Database
from coordinator.db.tables import devices, runs
from coordinator.device_api.identity import calling_device
from coordinator.errors import Refusal
from coordinator.identity.principals import ADMIN
from coordinator.scheduling.deployments import Deployment
from coordinator.server.app import OPERATOR_PREFIX, device_app
from coordinator.server.http_protocol import LimitedProtocol
from coordinator.server.metrics import Metrics
from coordinator.settings import Settings
from coordinator.storage.blobs import Blobs
from edge_client.wire.device import (
    BlobRef,
    CheckIn,
    CheckInAnswer,
    ModelRef,
    TaskOffer,
    UploadStart,
    UploadState,
    to_json,
)
from edge_client.wire.strict import parse_message
from tests.support.databases import with_tables

START = datetime(2026, 1, 5, 12, tzinfo=UTC)
REPORT = CheckIn(
    wire="1.3",
    software="1.0",
    runtimes={"litert": "2.1"},
    memory_bytes=2**30,
    datasets={"digits": 100},
    models=("cnn",),
)
MODEL = ModelRef("cnn", {}, (8, 8, 1), 10, "float32", "classification")

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Without it each client would read the certificates of all authorities, for 20 ms."""


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def pass_seconds(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class Refused(Exception):
    """A request was answered with an error; `error` is what the body says."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {error}")
        self.status = status
        self.code = error["code"]
        self.error = error


class World:
    """A serving device API. Rows of devices and runs are made here as enrolment and the run service make them."""

    def __init__(self, services: Services, url: str, clock: Clock) -> None:
        self.services = services
        self.url = url
        self.clock = clock

    def enrol(self, device: str, **changed: Any) -> TestDevice:
        """A device as it is after its enrolment; `changed` are columns of its row."""
        row = {
            "id": device,
            "name": f"the {device}",
            "device_group": "default",
            "state": "active",
            "key_sha256": hashlib.sha256(device.encode()).hexdigest(),
            "enrolled_at": self.clock(),
            "certificate_until": self.clock() + timedelta(days=30),
            "report": {},
        }
        self.services.database.write(lambda at: at.execute(insert(devices).values(**row | changed))).result()
        return TestDevice(self.url, device)

    def set_device(self, device: str, **changed: Any) -> None:
        statement = update(devices).where(devices.c.id == device).values(**changed)
        self.services.database.write(lambda at: at.execute(statement)).result()

    def start_run(self, run: str, *, deployed: bool = True, **changed: Any) -> Deployment:
        """A live run that any device may join; `changed` are attributes of its deployment."""
        row = {
            "id": run,
            "name": f"run {run}",
            "state": "running",
            "experiment": {},
            "notices": [],
            "created_at": self.clock(),
            "round": 0,
        }
        self.services.database.write(lambda at: at.execute(insert(runs).values(**row))).result()
        ref = BlobRef("0" * 64, 10)
        deployment = Deployment(run, row["name"], "digits", MODEL, ("litert",), ref, ref)  # type: ignore[arg-type]
        deployment = replace(deployment, **changed)
        if deployed:
            self.services.deployments.add(deployment)
        return deployment


class TestDevice:
    """The device's end of the API, a method a request."""

    __test__ = False

    def __init__(self, url: str, device: str) -> None:
        self.id = device
        self._http = httpx.Client(
            base_url=f"{url}/device/v1", headers={"x-device": device}, timeout=60, verify=NO_TLS
        )

    def check_in(self, read_seconds: float = 60, **changed: Any) -> CheckInAnswer:
        """Raises httpx.ReadTimeout, and closes the connection, without an answer within `read_seconds`."""
        body = to_json(replace(REPORT, **changed))
        answer = self._http.post("/checkin", json=body, timeout=read_seconds)
        return parse_message(CheckInAnswer, self._checked(answer), "answer")

    def lease(self, **changed: Any) -> TaskOffer:
        """The task that waits for this device."""
        offer = self.check_in(**changed).task
        assert offer is not None
        return offer

    def fetch(self, sha256: str, **headers: str) -> httpx.Response:
        answer = self._http.get(f"/blobs/{sha256}", headers=headers)
        self._checked(answer)
        return answer

    def start_upload(self, task: str, payload: bytes, **changed: Any) -> UploadState:
        upload_start = UploadStart(len(payload), hashlib.sha256(payload).hexdigest(), len(payload))
        body = self._post(f"/tasks/{task}/upload", to_json(replace(upload_start, **changed)))
        return parse_message(UploadState, body, "state")

    def put(self, task: str, offset: int, piece: bytes) -> UploadState:
        answer = self._http.put(f"/tasks/{task}/upload", params={"offset": offset}, content=piece)
        return parse_message(UploadState, self._checked(answer), "state")

    def upload(self, task: str, payload: bytes) -> UploadState:
        """All of it, from where it stopped."""
        state = self.start_upload(task, payload)
        return state if state.accepted else self.put(task, state.offset, payload[state.offset :])

    def upload_deflated(self, task: str, payload: bytes) -> UploadState:
        sent = zlib.compress(payload)
        state = self.start_upload(task, sent, decoded_bytes=len(payload), encoding="deflate")
        return self.put(task, state.offset, sent[state.offset :])

    def evaluated(self, task: str, figures: Mapping[str, Any]) -> None:
        self._post(f"/tasks/{task}/evaluation", figures)

    def report_statistics(self, task: str, statistics: Mapping[str, Any]) -> None:
        self._post(f"/tasks/{task}/statistics", statistics)

    def decline(self, task: str, code: str, message: str) -> None:
        self._post(f"/tasks/{task}/decline", {"code": code, "words": message})

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._checked(self._http.post(path, json=dict(body)))

    def _checked(self, answer: httpx.Response) -> Any:
        if answer.is_error:
            raise Refused(answer.status_code, answer.json()["error"])
        return answer.json() if answer.headers["content-type"] == "application/json" else None


@contextmanager
def serving(
    folder: Path, database: Database, *, certificates: bool = False, **settings: Any
) -> Iterator[World]:
    """A world in `folder`, over a database that has its tables. `certificates`: whether it has a CA."""
    clock = Clock()
    chosen = Settings(home=folder, database_url=str(database.engine.url), **settings)
    services = Services(
        settings=chosen,
        database=database,
        blobs=Blobs(folder / "blobs"),
        signals=Signals(),
        authority=Authority.open(chosen, clock) if certificates else cast(Authority, None),
        clock=clock,
    )
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            _app(services),
            http=LimitedProtocol,
            lifespan="off",
            log_level="error",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield World(services, f"http://127.0.0.1:{listening.getsockname()[1]}", clock)
    finally:
        services.signals.close()
        server.should_exit = True
        thread.join()
        listening.close()


@contextmanager
def sqlite(folder: Path) -> Iterator[Database]:
    """A new database with all tables."""
    url = f"sqlite:///{folder}/fedloop.db"
    with_tables(url)
    database = Database(url)
    yield database
    database.close()


def _app(services: Services) -> FastAPI:
    app = device_app(services, Metrics(services.database, services.signals))
    app.include_router(participation.router, prefix=OPERATOR_PREFIX)
    app.dependency_overrides[require_permission] = lambda: ADMIN
    app.dependency_overrides[calling_device] = _named_in_header
    return app


def _named_in_header(request: Request) -> str:
    name = request.headers.get("x-device")
    if name is None:
        raise Refusal(401, "no_certificate", "no x-device header")
    return name
