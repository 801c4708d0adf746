"""A lock on the database, a server or a folder that is away, a lost blob or token: 503 with a code, until it is mended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import create_engine, make_url, text

from coordinator.accounts.admin_token import TOKEN_FILE, ensure_admin_token, read_admin_token
from coordinator.context.services import Services
from coordinator.db import store
from coordinator.db.store import Database
from coordinator.runs.service import RunService
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.coordinator.test_uploads import OpenRound
from tests.support.databases import database, database_url
from tests.support.device_world import Refused, serving
from tests.support.fake_devices import answering
from tests.support.proxies import Line
from tests.support.services import services_in

__all__ = ["database", "database_url"]

PATIENCE_SECONDS = 0.3


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PATIENCE_SECONDS", PATIENCE_SECONDS)


def operator(services: Services) -> TestClient:
    metrics = Metrics(services.database, services.signals)
    app = operator_app(services, RunService(services, answering), metrics)
    headers = {"Authorization": f"Bearer {read_admin_token(services.settings.home)}"}
    return TestClient(app, base_url="http://127.0.0.1", headers=headers, raise_server_exceptions=False)


@pytest.fixture
def services(tmp_path: Path, database_url: str) -> Iterator[Services]:
    with (
        services_in(tmp_path / "home", database_url) as opened,
        closing(Database(database_url, patience_seconds=PATIENCE_SECONDS)) as impatient,
    ):
        yield replace(opened, database=impatient)


@pytest.fixture
def opened(tmp_path: Path, database: Database) -> Iterator[OpenRound]:
    with serving(tmp_path, database, lease_seconds=1e6) as world:
        yield OpenRound(world)


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Another process holds the lock of all that writes."""
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg") if "postgres" in url else url)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("LOCK TABLE tokens IN ACCESS EXCLUSIVE MODE"))
        else:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield
        connection.rollback()
    engine.dispose()


def outcome(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_locked_database(services: Services, database_url: str) -> None:
    client = operator(services)
    with locked(database_url):
        refused = client.post("/api/v1/tokens", json={})
        assert outcome(refused) == (503, "database_unavailable")
        assert "lock" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
    assert client.post("/api/v1/tokens", json={}).status_code < 300


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"\xff")]
)
def test_an_admin_token_that_is_gone(services: Services, damage: Any) -> None:
    client, path = operator(services), services.settings.home / TOKEN_FILE
    kept = path.read_bytes()
    damage(path)
    refused = client.get("/api/v1/system")
    assert outcome(refused) == (503, "no_admin_token")
    assert TOKEN_FILE in refused.json()["error"]["message"]
    path.write_bytes(kept)
    assert client.get("/api/v1/system").status_code == 200


def test_an_emptied_token_is_made_anew_at_start(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).touch()
    ensure_admin_token(tmp_path)
    assert len(read_admin_token(tmp_path)) > 30


@pytest.mark.slow
def test_a_server_that_is_away(tmp_path: Path) -> None:
    """Of PostgreSQL; SQLite has none."""
    from tests.support.databases import postgres

    url = postgres().create()
    with Line(("127.0.0.1", postgres().port)) as line:
        through = make_url(url).set(port=line.address[1]).render_as_string()
        with (
            services_in(tmp_path / "home", through) as made,
            closing(Database(through, patience_seconds=PATIENCE_SECONDS)) as impatient,
        ):
            client = operator(replace(made, database=impatient))
            assert client.get("/healthz").status_code == 200
            line.cut()
            assert outcome(client.get("/healthz")) == (503, "database_unavailable")
            assert outcome(client.get("/api/v1/runs")) == (503, "database_unavailable")
            assert outcome(client.post("/api/v1/tokens", json={})) == (503, "database_unavailable")
            line.mend()
            assert client.get("/healthz").status_code == 200
            assert client.post("/api/v1/tokens", json={}).status_code < 300
    postgres().drop(url)


def refusal(act: Any) -> tuple[int, str]:
    with pytest.raises(Refused) as caught:
        act()
    assert str(caught.value.error).count("/") == 0  # devices need not know our paths
    return caught.value.status, caught.value.code


def test_a_lost_blob(opened: OpenRound) -> None:
    offer = opened.devices["a"].lease()
    home = opened.world.services.settings.home
    blob = home / "blobs" / offer.params.sha256
    content = blob.read_bytes()
    blob.unlink()
    assert refusal(lambda: opened.devices["a"].fetch(offer.params.sha256)) == (503, "blob_damaged")
    blob.write_bytes(content)
    assert opened.devices["a"].fetch(offer.params.sha256).content == content


@pytest.mark.parametrize("deflated", [False, True])
def test_a_folder_that_is_away(opened: OpenRound, deflated: bool) -> None:
    """Nothing is lost of the upload: with the folder back it goes on."""
    device, task, payload = opened.leased("a")
    home = opened.world.services.settings.home
    upload = device.upload_deflated if deflated else device.upload
    (home / "blobs").rename(home / "away")
    offered = opened.world.services.database.read(_params_of(task))
    assert refusal(lambda: device.fetch(offered)) == (503, "storage_unavailable")
    for _ in range(2):
        assert refusal(lambda: upload(task, payload)) == (503, "storage_unavailable")
    (home / "away").rename(home / "blobs")
    assert upload(task, payload).accepted


def _params_of(task: str) -> Any:
    from sqlalchemy import select

    from coordinator.db.tables import tasks

    query = select(tasks.c.offer).where(tasks.c.id == task)
    return lambda at: at.execute(query).scalar_one()["params"]["sha256"]
