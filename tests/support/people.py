"""Users of a coordinator without a process around it, and clients that sign in as a browser or hold a token."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from argon2 import PasswordHasher
from fastapi import FastAPI
from fastapi.testclient import TestClient

from coordinator.context.services import Services
from coordinator.identity import access_tokens, passwords, users
from coordinator.identity.principals import ADMIN, Role
from coordinator.limits.rates import SignIns
from coordinator.runs.service import RunService
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.support.fake_devices import answering
from tests.support.services import services_in

PASSWORD = "a mule in the tidal flats"
NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
ORIGIN = "http://127.0.0.1:8080"


class Clock:
    """Time that passes when told to."""

    def __init__(self, now: datetime = NOW) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def pass_time(self, **amount: float) -> None:
        self.now += timedelta(**amount)


@pytest.fixture
def cheap_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """Argon2id with so little work that a test does not wait for it."""
    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(passwords, "_hasher", lambda: hasher)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services_in(tmp_path_factory.mktemp("coordinator") / "home") as services:
        yield services


@pytest.fixture
def services(opened: Services, clock: Clock) -> Services:
    """With the test's own clock, and nobody who has tried to sign in."""
    return replace(opened, clock=clock, sign_ins=SignIns())


@pytest.fixture
def app(services: Services) -> FastAPI:
    return app_of(services)


def app_of(services: Services) -> FastAPI:
    return operator_app(
        services, RunService(services, answering), Metrics(services.database, services.signals)
    )


def add_user(
    services: Services, role: Role, name: str | None = None, password: str = PASSWORD
) -> users.UserRow:
    hashed = passwords.hash_password(password)
    return services.commit(
        lambda at: users.add_user(
            at, name or f"{role}-{uuid.uuid4().hex[:6]}", role, hashed, services.clock()
        )
    )


def token_of(services: Services, owner: users.UserRow, role: Role | None = None, days: float = 1) -> str:
    _, text = services.commit(
        lambda at: access_tokens.create_access_token(
            at, owner, ADMIN, "test", role, timedelta(days=days), services.clock()
        )
    )
    return text


def anyone(app: FastAPI, base_url: str = ORIGIN, **headers: str) -> TestClient:
    return TestClient(
        app, base_url=base_url, headers=headers, raise_server_exceptions=False, client=("127.0.0.1", 5000)
    )


def bearer(app: FastAPI, token: str) -> TestClient:
    return anyone(app, Authorization=f"Bearer {token}")


def browser(app: FastAPI, name: str, password: str = PASSWORD, base_url: str = ORIGIN) -> TestClient:
    """Signed in, and sends what a page of ours does."""
    client = anyone(app, base_url, Origin=base_url)
    answer = client.post("/api/v1/session", json={"name": name, "password": password})
    assert answer.status_code == 201, answer.text
    client.headers["X-CSRF-Token"] = answer.json()["csrf_token"]
    return client


def code_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]
