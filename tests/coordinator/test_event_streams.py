"""A stream of events that is open ends with the credentials that opened it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from coordinator.accounts.admin_token import read_admin_token
from coordinator.api import events as stream
from coordinator.context.services import Services
from coordinator.db import events
from coordinator.identity import access_tokens, sessions, tables, users
from coordinator.identity.principals import ADMIN
from tests.support.people import (
    Clock,
    add_user,
    app,
    bearer,
    browser,
    cheap_passwords,
    clock,
    opened,
    services,
    token_of,
)
from tests.support.waiting import wait_until

__all__ = ["app", "cheap_passwords", "clock", "opened", "services"]

pytestmark = pytest.mark.usefixtures("cheap_passwords")


@pytest.fixture(autouse=True)
def checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_CHECK_SECONDS", 0.02)


def events_until_cut(services: Services, client: TestClient, cut: Callable[[], object]) -> list[str]:
    """The events of a stream that is open when `cut` is called, up to its end."""

    def beside() -> None:
        wait_until(lambda: services.signals.count_waiting("events") == 1)
        services.database.write(
            lambda at: events.record(at, services.clock(), "before", project="default")
        ).result()
        services.signals.notify("events")
        wait_until(lambda: services.signals.count_waiting("events") == 1)
        cut()

    thread = threading.Thread(target=beside)
    thread.start()
    with client.stream("GET", "/api/v1/events") as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line.startswith("data:")]
    thread.join()
    return [json.loads(line[5:])["event"] for line in lines]


@pytest.mark.parametrize("how", ["disabled", "other role", "signed out", "everywhere", "idle", "password"])
def test_a_stream_of_a_session_ends_with_it(how: str, app: FastAPI, services: Services, clock: Clock) -> None:
    user = add_user(services, "operator")
    reader, other = browser(app, user.name), browser(app, user.name)
    secret = reader.cookies["fedloop-session-8080"]
    cuts: dict[str, Callable[[], object]] = {
        "disabled": lambda: services.commit(
            lambda at: users.change_user(at, user.name, clock.now, disabled=True)
        ),
        "other role": lambda: services.commit(
            lambda at: users.change_user(at, user.name, clock.now, role="viewer")
        ),
        "signed out": lambda: services.commit(lambda at: sessions.end_session(at, secret)),
        "everywhere": lambda: other.post("/api/v1/session/end-all"),
        "idle": lambda: clock.pass_time(hours=1),
        "password": lambda: services.commit(lambda at: users.set_password(at, user.id, "*", clock.now)),
    }
    assert events_until_cut(services, reader, cuts[how]) == ["before"]


@pytest.mark.parametrize("how", ["revoked", "expired", "disabled"])
def test_a_stream_of_a_token_ends_with_it(how: str, app: FastAPI, services: Services, clock: Clock) -> None:
    user = add_user(services, "viewer")
    text = token_of(services, user)
    found = services.database.read(lambda at: access_tokens.find_access_token(at, text, clock.now))
    assert found is not None
    token = found[0].credential or ""
    cuts: dict[str, Callable[[], object]] = {
        "revoked": lambda: services.commit(
            lambda at: access_tokens.revoke_access_token(at, token, ADMIN, clock.now)
        ),
        "expired": lambda: clock.pass_time(days=1),
        "disabled": lambda: services.commit(
            lambda at: users.change_user(at, user.name, clock.now, disabled=True)
        ),
    }
    assert events_until_cut(services, bearer(app, text), cuts[how]) == ["before"]


def test_a_stream_keeps_no_session_alive(app: FastAPI, services: Services, clock: Clock) -> None:
    user = add_user(services, "viewer")
    reader = browser(app, user.name)

    def pass_the_hour() -> None:
        for _ in range(6):
            clock.now += timedelta(minutes=10)
            threading.Event().wait(0.05)  # a few checks

    events_until_cut(services, reader, pass_the_hour)
    last = services.database.read(
        lambda at: at.execute(tables.sessions.select().where(tables.sessions.c.user == user.id)).all()
    )
    assert [row.last_used_at == row.created_at for row in last] == [True]


def test_a_stream_of_the_admin_token_goes_on(app: FastAPI, services: Services, clock: Clock) -> None:
    token = read_admin_token(services.settings.home)
    path = services.settings.home / "admin.token"

    def go_on() -> None:
        clock.pass_time(days=30)
        threading.Event().wait(0.1)  # several checks
        services.commit(lambda at: events.record(at, clock.now, "later", project="default"))
        wait_until(lambda: services.signals.count_waiting("events") == 1)
        path.write_text("x" * 43)  # replaced: then it ends too

    try:
        assert events_until_cut(services, bearer(app, token), go_on) == ["before", "later"]
    finally:
        path.write_text(token + "\n")
