"""Sign-in at a real OpenID provider, in a real browser, on a real coordinator."""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.coordinator.test_serve import ANY_PORTS, served
from tests.support.browser import find_browser, running
from tests.support.openid import client_of_provider, openid_provider

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_a_browser_signs_in_at_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_browser()
    client = client_of_provider("fedloop", "http://localhost/sign-in/oidc")
    monkeypatch.setenv("FEDLOOP_OIDC_CLIENT_SECRET", client["client_secret"])
    people = {"carla": {"preferred_username": "carla", "groups": ["ml-team"]}, "nobody": {"groups": ["all"]}}
    with openid_provider([client], people) as issuer:
        flags = (
            *ANY_PORTS,
            "--oidc-issuer",
            issuer,
            "--oidc-client-id",
            "fedloop",
            "--oidc-role",
            "ml-team=operator",
        )
        with served(tmp_path / "home", *flags) as (_, place):
            requested = {
                "url": place["operator"].replace("127.0.0.1", "localhost"),  # another site than the provider
                "provider": urlsplit(issuer).netloc,
                "login": "carla",
                "pictures": os.environ.get("FEDLOOP_TEST_PICTURES"),
            }
            with running("oidc.mjs", requested) as page:
                assert page.stdout is not None
                shown = json.loads(page.stdout.readline())
            assert not (tmp_path / "home" / "setup-link").exists()  # there are users now
        log = (tmp_path / "home.log").read_text()
    assert "you have no role here" in shown["refusal"]
    assert urlsplit(shown["afterRefusal"]).path == "/"
    assert not urlsplit(shown["afterRefusal"]).query
    assert not urlsplit(shown["address"]).query
    assert (shown["name"], shown["role"]) == ("carla", "operator")
    assert (shown["sameSite"], shown["httpOnly"], shown["problems"]) == ("Strict", True, [])
    assert client["client_secret"] not in log
    assert "code=" not in log
