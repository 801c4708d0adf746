"""The web console's client is the API's, and the page is served under a strict policy."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from coordinator.server.console import BUILT, HEADERS, SecurityHeadersMiddleware, add_console
from tests.support.console_contract import FILES
from tests.support.people import anyone, app_of
from tests.support.require import require
from tests.support.services import services_in


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_committed_contract_is_the_apis(path: Path) -> None:
    assert json.loads(path.read_text("utf-8")) == json.loads(json.dumps(FILES[path]())), (
        "run `make web-types`"
    )


@pytest.fixture
def built(tmp_path: Path) -> Path:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<title>Fedloop</title>")
    (tmp_path / "assets" / "index-1a2b.js").write_text("export {};")
    return tmp_path


def served(folder: Path) -> TestClient:
    app = FastAPI()
    add_console(app, folder)
    app.add_middleware(SecurityHeadersMiddleware)
    return TestClient(app)


def test_page_and_assets_are_served_with_their_headers(built: Path) -> None:
    client = served(built)
    page, asset = client.get("/"), client.get("/assets/index-1a2b.js")
    assert (page.status_code, page.text) == (200, "<title>Fedloop</title>")
    assert page.headers["cache-control"] == "no-cache"
    assert asset.headers["cache-control"].endswith("immutable")
    for response in (page, asset, client.get("/assets/absent.js")):
        assert {name: response.headers[name] for name in HEADERS} == HEADERS


def test_every_answer_of_the_operators_port_has_the_strict_policy(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        client = anyone(app_of(services))
        answers = [
            client.get("/"),
            client.get("/api/v1/session/methods"),
            client.get("/api/v1/runs"),
            client.get("/assets/absent.js"),
            client.get("/nowhere"),
            client.post("/api/v1/session", json={"name": "nobody", "password": "wrong"}),
        ]
    assert [each.status_code for each in answers][1:] == [200, 401, 404, 404, 401]
    for answer in answers:
        policy = dict(
            each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";")
        )
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self' data:",
            "font-src": "'self'",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'self'",
            "frame-ancestors": "'none'",
        }, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"


def test_no_file_outside_of_the_assets_is_served(built: Path) -> None:
    (built / "secret").write_text("secret")
    client = served(built)
    for path in ("/secret", "/assets/../secret", "/assets/%2e%2e/secret", "/assets/..%2fsecret"):
        assert client.get(path).status_code == 404


def test_the_scripts_of_the_first_view_take_at_most_120_kb() -> None:
    if not (BUILT / "index.html").is_file():
        require("console", "`make web` did not build the console")
    page = (BUILT / "index.html").read_text("utf-8")
    scripts = re.findall(r'(?:src|href)="/(assets/[^"]+\.js)"', page)  # those that the page preloads too
    assert scripts
    assert sum(len(gzip.compress((BUILT / each).read_bytes())) for each in scripts) <= 120_000


def test_without_a_build_the_page_says_how_to_make_one(tmp_path: Path) -> None:
    answer = served(tmp_path).get("/")
    assert answer.status_code == 503
    assert "make web" in answer.text
