"""OpenID providers on loopback: a real one, `oidc-provider` from npm in a process of its own, and one that lies as it is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse

from tests.support.console_contract import WEB
from tests.support.doorway import listening
from tests.support.require import require

SECRET = "a secret of the client"
_SCRIPT = Path(__file__).with_name("oidc_provider.mjs")
_FORM = re.compile(r'<form[^>]* action="([^"]+)"')
_PROMPT = re.compile(r'name="prompt" value="(\w+)"')


@contextmanager
def openid_provider(clients: list[dict[str, Any]], users: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The issuer of a real provider with these clients and users (login -> claims); any password is right."""
    if not (WEB / "node_modules" / "oidc-provider").is_dir():
        require("chromium", "`make web` has not installed the OpenID provider of the tests")
    arguments = [str(WEB), json.dumps({"clients": clients, "users": users})]
    node = Path(sys.executable).parent / "node"
    process = subprocess.Popen(
        [str(node), str(_SCRIPT), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()  # it ends with its standard input


def client_of_provider(name: str, *redirect_uris: str) -> dict[str, Any]:
    """A client to register; its redirect URIs on loopback stand for any port."""
    return {
        "client_id": name,
        "client_secret": SECRET,
        "application_type": "native",
        "redirect_uris": list(redirect_uris),
        "id_token_signed_response_alg": "ES256",
    }


def answer_of(authorization_url: str, redirect_uri: str, login: str) -> dict[str, str]:
    """Signs in on the provider's own pages, as a person does; the parameters with which it sends the browser back."""
    with httpx.Client(timeout=30) as browser:
        url, answer = authorization_url, browser.get(authorization_url)
        for _ in range(20):
            if answer.is_redirect:
                url = urljoin(url, answer.headers["location"])
                if url.startswith(redirect_uri):
                    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
                answer = browser.get(url)
                continue
            form, prompt = _FORM.search(answer.text), _PROMPT.search(answer.text)
            assert form is not None, answer.text[:2000]
            assert prompt is not None, answer.text[:2000]
            url = urljoin(url, form[1])
            answer = browser.post(url, data={"prompt": prompt[1], "login": login, "password": "any"})
    raise AssertionError("the provider never sent the browser back")


@dataclass
class LyingProvider:
    """Answers as it is told: `id_token` to any code, and these keys."""

    issuer: str = ""
    id_token: str = ""
    keys: list[dict[str, Any]] = field(default_factory=list)
    changed: dict[str, Any] = field(default_factory=dict)
    """Of the discovery document."""
    moved_to: str = ""
    """Where the discovery document redirects to."""


@contextmanager
def lying_provider() -> Iterator[LyingProvider]:
    """A provider whose answers the test chooses."""
    provider, app = LyingProvider(), FastAPI()

    @app.get("/.well-known/openid-configuration", response_model=None)
    def discovery() -> dict[str, Any] | RedirectResponse:
        if provider.moved_to:
            return RedirectResponse(provider.moved_to)
        paths = {"authorization_endpoint": "auth", "token_endpoint": "token", "jwks_uri": "jwks"}
        return {
            "issuer": provider.issuer,
            **{key: f"{provider.issuer}/{path}" for key, path in paths.items()},
            **provider.changed,
        }

    @app.get("/jwks")
    def jwks() -> dict[str, Any]:
        return {"keys": provider.keys}

    @app.post("/token")
    def token(request: Request) -> dict[str, Any]:
        return {"access_token": "of no use", "token_type": "Bearer", "id_token": provider.id_token}

    with listening(app) as port:
        provider.issuer = f"http://127.0.0.1:{port}"
        yield provider
