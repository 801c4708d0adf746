"""The web console's client is the API's, and the page is served under a strict policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from coordinator.server.console import HEADERS, SecurityHeadersMiddleware, add_console
from tests.support.console_contract import FILES


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


def test_no_file_outside_of_the_assets_is_served(built: Path) -> None:
    (built / "secret").write_text("secret")
    client = served(built)
    for path in ("/secret", "/assets/../secret", "/assets/%2e%2e/secret", "/assets/..%2fsecret"):
        assert client.get(path).status_code == 404


def test_without_a_build_the_page_says_how_to_make_one(tmp_path: Path) -> None:
    answer = served(tmp_path).get("/")
    assert answer.status_code == 503
    assert "make web" in answer.text
