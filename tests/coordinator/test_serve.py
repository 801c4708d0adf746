"""`fedloop serve` as a process: its output, what it refuses at start, how it ends."""

from __future__ import annotations

import json
import signal
import ssl
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import urllib3

from coordinator.errors import UserError
from coordinator.operator.client import (
    OperatorClient,
    Refused,
    Unreachable,
)
from coordinator.option_parsers import address
from coordinator.settings import Settings, read_settings
from edge_client.processes.process import tie_to_parent
from tests.support.cli import FEDLOOP, run_here
from tests.support.doorway import error_of
from tests.support.people import PASSWORD
from tests.support.proxies import TerminatingProxy

ANY_PORTS = ("--operator", "127.0.0.1:0", "--device", "127.0.0.1:0")
ENDS_SECONDS = 60


@contextmanager
def served(home: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A coordinator, and its announced addresses."""
    command = tie_to_parent([str(FEDLOOP), "serve", "--home", str(home), *(flags or ANY_PORTS)])
    with (home.parent / f"{home.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def client_of(home: Path, place: dict[str, Any]) -> OperatorClient:
    return OperatorClient(place["operator"], (home / "admin.token").read_text().strip())


@pytest.mark.slow
def test_a_coordinator_serves_both_apis_and_ends_cleanly(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with served(home) as (process, place):
        assert place["event"] == "serving"
        assert json.loads((home / "serve.json").read_text())["operator"] == place["operator"]
        assert client_of(home, place).get("/system")["runs"] == {}
        with pytest.raises(Refused) as refused:
            OperatorClient(place["operator"], "guessed").get("/system")
        assert refused.value.code == "bad_token"
        pool = urllib3.PoolManager(ca_certs=str(home / "pki" / "ca.pem"), retries=False)
        answer = pool.request("POST", place["device_url"] + "/device/v1/checkin", json={})
        assert (answer.status, answer.json()["error"]["code"]) == (401, "no_certificate")
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "admin.token").stat().st_mode) == 0o600
        assert stat.S_IMODE((home / "setup-link").stat().st_mode) == 0o600
        link = (home / "setup-link").read_text().strip()
        address, _, secret = link.partition("/#setup=")
        assert (address, len(secret)) == (place["operator"], 43)
        assert_cookies_are_those_of_tls(home, place["operator"], secret)
        log = (tmp_path / "home.log").read_text()
        assert "setup-link" in log
        assert secret not in log + json.dumps(place)
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_SECONDS) == 0


def assert_cookies_are_those_of_tls(home: Path, operator: str, secret: str) -> None:
    """The first user comes in through a proxy that ends TLS. Their cookie is worth nothing without TLS."""
    parts = urlsplit(operator)
    proxy = TerminatingProxy((str(parts.hostname), int(parts.port or 0)), home / "pki", to_operator=True)
    context = ssl.create_default_context(cafile=str(home / "pki" / "ca.pem"))
    account = {"secret": secret, "name": "anna", "password": PASSWORD}
    with proxy, httpx.Client(verify=context, base_url=f"https://localhost:{proxy.address[1]}") as browser:
        origin = {"Origin": str(browser.base_url).rstrip("/")}
        in_clear = {"Origin": origin["Origin"].replace("https", "http")}
        assert error_of(browser.post("/api/v1/setup", json=account, headers=in_clear)) == (403, "csrf")
        made = browser.post("/api/v1/setup", json=account, headers=origin | {"X-Forwarded-Proto": "http"})
        assert made.status_code == 201, made.text
        name, _, rest = made.headers["set-cookie"].partition("=")
        flags = {flag.strip().lower() for flag in rest.split(";")[1:]}
        assert name == "__Host-fedloop-session"
        assert {"secure", "httponly", "samesite=strict", "path=/"} <= flags
        assert not any(flag.startswith("domain") for flag in flags)
        token = {"X-CSRF-Token": made.json()["csrf_token"]}
        assert browser.get("/api/v1/session").json()["name"] == "anna"
        assert browser.post("/api/v1/tokens", json={}, headers=token | origin).status_code == 201
        assert error_of(browser.post("/api/v1/tokens", json={}, headers=token | in_clear)) == (403, "csrf")
        cookie = {"Cookie": f"{name}={browser.cookies[name]}"}
        assert error_of(httpx.get(f"{operator}/api/v1/session", headers=cookie)) == (401, "no_token")


@pytest.mark.slow
def test_a_client_that_follows_events_does_not_delay_the_shutdown(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with served(home) as (process, place):
        client = client_of(home, place)
        client.post("/tokens", {})
        stream = client.events("/events")
        assert next(stream)["event"] == "token_made"
        process.send_signal(signal.SIGINT)
        assert list(stream) == []
        assert process.wait(ENDS_SECONDS) == 0
        with pytest.raises(Unreachable, match="fedloop serve"):
            client.get("/system")


@pytest.mark.slow
def test_a_home_has_one_coordinator_and_a_port_one_server(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with served(home) as (_, place):
        second = run_here("serve", "--home", home, *ANY_PORTS)
        assert second.returncode == 2
        assert "another coordinator uses this home" in second.stderr
        taken = place["operator"].removeprefix("http://")
        third = run_here(
            "serve", "--home", tmp_path / "other", "--operator", taken, "--device", "127.0.0.1:0"
        )
        assert third.returncode == 2
        assert "the port is in use" in third.stderr
        assert "Traceback" not in second.stderr + third.stderr


@pytest.mark.slow
def test_every_bad_option_is_reported_at_once(tmp_path: Path) -> None:
    bad = run_here(
        *("serve", "--home", tmp_path / "home", "--operator", "8080", "--device-url", "http://x"),
        *("--certificate-days", "none", "--ca-cert", tmp_path / "ca.pem"),
        *("--lease-seconds", "0", "--checkins-per-second", "nan", "--held", "-1"),
    )
    assert bad.returncode == 2
    options = ("--operator", "--device-url", "--certificate-days", "--ca-cert")
    for option in (*options, "--lease-seconds", "--checkins-per-second", "--held"):
        assert option in bad.stderr
    assert not (tmp_path / "home").exists()


# Settings


def settings_of(**values: Any) -> Settings:
    return read_settings({"home": Path("/nowhere"), **values})


def refused_settings(**values: Any) -> str:
    with pytest.raises(UserError) as caught:
        settings_of(**values)
    return str(caught.value)


def test_the_operator_api_stays_on_loopback_by_default() -> None:
    assert "admin token over the network in clear" in refused_settings(operator="0.0.0.0:8080")
    assert "--insecure-operator" in refused_settings(operator="fed.example.org:8080")
    allowed = settings_of(operator="0.0.0.0:8080", insecure_operator=True)
    assert allowed.operator.host == "0.0.0.0"


def test_key_and_certificate_of_a_ca_belong_together(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    assert "belong together" in refused_settings(ca_certificate=tmp_path / "ca.pem")


def test_devices_get_the_port_that_was_bound() -> None:
    settings = settings_of(device="0.0.0.0:0", names=["fed.example.org"])
    assert settings.with_ports(1, 4711).device_url == "https://fed.example.org:4711"
    given = settings_of(device_url="https://edge.example.org:443/")
    assert given.with_ports(1, 4711).device_url == "https://edge.example.org:443"


@pytest.mark.parametrize(
    ("text", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("localhost:65535", ("localhost", 65535))],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert address(text) == parts


@pytest.mark.parametrize("text", ["8080", ":80", "host:", "host:70000", "host:-1", ""])
def test_invalid_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        address(text)


# Commands


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "--coordinator", "http://127.0.0.1:1"], "no coordinator answers"),
        (["run", "--coordinator", "nowhere"], "is not an address"),
        (["run", "missing.toml"], "no such experiment file"),
        (["run", "--set", "local.lr=-1"], "local.lr"),
        (["run", "--follow", "x", "--set", "a=1"], "--follow takes everything from the run"),
    ],
)
def test_run_reports_a_mistake(tmp_path: Path, args: Sequence[str], message: str) -> None:
    done = run_here(*args, cwd=tmp_path, env={"FEDLOOP_ADMIN_TOKEN": "t"})
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_run_without_a_token_names_the_expected_file(tmp_path: Path) -> None:
    done = run_here("run", env={"FEDLOOP_HOME": str(tmp_path), "FEDLOOP_ADMIN_TOKEN": ""})
    assert done.returncode == 2
    assert str(tmp_path / "admin.token") in done.stderr.replace("\n", "")
