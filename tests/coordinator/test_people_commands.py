"""`fedloop user`, `access-token`, `login`, `logout` and `whoami` against a real operator API."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from structlog.testing import capture_logs
from typer.testing import CliRunner

from coordinator.accounts.admin_token import read_admin_token
from coordinator.commands.cli import app
from coordinator.errors import UserError
from coordinator.identity import setup_links
from coordinator.operator.client import OperatorClient, Refused
from coordinator.operator.credentials import credentials_file, find_credential, save_token
from tests.support.doorway import listening
from tests.support.people import PASSWORD, app_of, cheap_passwords
from tests.support.services import services_in

__all__ = ["cheap_passwords"]

Fedloop = Callable[..., Result]


@pytest.fixture
def fedloop(cheap_passwords: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fedloop]:
    """Runs `fedloop …` with lines on standard input; a user's mistake is raised. There is no admin token at hand."""
    with services_in(tmp_path / "home") as services, capture_logs(), listening(app_of(services)) as port:
        url = f"http://127.0.0.1:{port}"
        setup_links.offer_setup_link(services.settings.home, url, services.database, services.clock())
        monkeypatch.setenv("FEDLOOP_COORDINATOR", url)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setenv("FEDLOOP_HOME", str(tmp_path / "elsewhere"))
        monkeypatch.delenv("FEDLOOP_TOKEN", raising=False)
        monkeypatch.delenv("FEDLOOP_ADMIN_TOKEN", raising=False)

        def run(*args: str, lines: tuple[str, ...] = ()) -> Result:
            done = CliRunner().invoke(app, args, input="".join(f"{line}\n" for line in lines))
            if isinstance(done.exception, UserError):
                raise done.exception
            assert done.exit_code == 0, done.output
            return done

        run.home = services.settings.home  # type: ignore[attr-defined]
        yield run


def set_up(fedloop: Any) -> str:
    link = (fedloop.home / setup_links.LINK_FILE).read_text().strip()
    fedloop("user", "setup", "--name", "anna", lines=(link, PASSWORD))
    return str(link)


@pytest.mark.slow
def test_the_first_user_comes_in_by_the_link_and_manages_the_others(
    fedloop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = set_up(fedloop)
    with pytest.raises(UserError, match="was used"):
        fedloop("user", "setup", "--name", "eve", lines=(link, PASSWORD))
    assert "as anna (admin)" in fedloop("login", "--name", "anna", lines=(PASSWORD,)).stdout
    assert stat.S_IMODE(credentials_file().stat().st_mode) == 0o600
    who = json.loads(fedloop("whoami", "--json").stdout)
    assert (who["name"], who["kind"]) == ("anna", "access_token")

    fedloop("user", "add", "bob", "--role", "viewer", lines=(PASSWORD,))
    assert "operator" in fedloop("user", "role", "bob", "operator").stdout
    listed = fedloop("user", "list").stdout.splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [
        ["anna", "admin", "enabled"],
        ["bob", "operator", "enabled"],
    ]

    token = fedloop("access-token", "create", "ci", "--user", "bob", "--role", "viewer").stdout.strip()
    monkeypatch.setenv("FEDLOOP_TOKEN", token)  # comes before the file
    assert "bob (viewer)" in fedloop("whoami").stdout
    with pytest.raises(UserError, match="needs the role operator; bob has viewer"):
        fedloop("device", "token")
    monkeypatch.delenv("FEDLOOP_TOKEN")

    (of_bob,) = json.loads(fedloop("access-token", "list", "--user", "bob", "--json").stdout)
    assert "is revoked" in fedloop("access-token", "revoke", of_bob["id"]).stdout
    assert "revoked" in fedloop("access-token", "list").stdout
    new = "three herons over wet slate"
    fedloop("user", "password", "bob", lines=(new,))
    fedloop("user", "disable", "bob")
    with pytest.raises(UserError, match="or the account is disabled"):
        fedloop("login", "--name", "bob", lines=(new,))
    fedloop("user", "enable", "bob")
    fedloop("login", "--name", "bob", lines=(new,))
    fedloop("user", "password", lines=(new, PASSWORD))
    assert "bob" in fedloop("login", "--name", "bob", lines=(PASSWORD,)).stdout


@pytest.mark.slow
def test_commands_work_in_the_project_that_the_flag_the_variable_or_the_token_names(
    fedloop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(fedloop)
    fedloop("login", "--name", "anna", lines=(PASSWORD,))
    for name in ("alpha", "beta"):
        fedloop("project", "create", name)
    fedloop("user", "add", "bob", "--role", "viewer", lines=(PASSWORD,))
    assert (
        "has the role operator in alpha"
        in fedloop("project", "add-member", "alpha", "bob", "--role", "operator").stdout
    )
    assert json.loads(fedloop("project", "members", "alpha", "--json").stdout)[0]["user"] == "bob"

    def in_project(name: str) -> str:
        return str(json.loads(fedloop("--project", name, "whoami", "--json").stdout)["project"])

    assert [in_project(name) for name in ("alpha", "beta", "default")] == ["alpha", "beta", "default"]
    fedloop("login", "--name", "bob", "--project", "alpha", lines=(PASSWORD,))
    who = json.loads(fedloop("whoami", "--json").stdout)
    assert (who["project"], who["role"], who["projects"]) == ("alpha", "operator", ["alpha"])
    with pytest.raises(UserError, match="beta"):
        fedloop("--project", "beta", "whoami")
    monkeypatch.setenv("FEDLOOP_PROJECT", "beta")
    with pytest.raises(UserError, match="beta"):
        fedloop("device", "list")
    assert in_project("alpha") == "alpha"  # the flag comes before the variable
    monkeypatch.setenv("FEDLOOP_PROJECT", "Not A Name")
    with pytest.raises(UserError, match="expected lower-case letters"):
        fedloop("whoami")
    monkeypatch.delenv("FEDLOOP_PROJECT")

    fedloop("login", "--name", "anna", lines=(PASSWORD,))
    fedloop("project", "remove-member", "alpha", "bob")
    assert "no members" in fedloop("project", "members", "alpha").stdout
    assert "is archived" in fedloop("project", "archive", "alpha").stdout
    with pytest.raises(UserError, match="archived"):
        fedloop("--project", "alpha", "device", "token")
    assert "is open" in fedloop("project", "archive", "alpha", "--undo").stdout
    names = [each["name"] for each in json.loads(fedloop("project", "list", "--json").stdout)]
    assert names == ["alpha", "beta", "default"]


def test_signing_out_revokes_the_token_and_forgets_it(fedloop: Any) -> None:
    set_up(fedloop)
    fedloop("login", "--name", "anna", lines=(PASSWORD,))
    (token,) = json.loads(credentials_file().read_text()).values()
    assert "signed out" in fedloop("logout").stdout
    assert json.loads(credentials_file().read_text()) == {}
    with pytest.raises(UserError, match=r"not signed in to .*fedloop login"):
        fedloop("whoami")
    with pytest.raises(UserError, match="neither the admin token"):
        fedloop("login", "--with-token", lines=(token,))
    assert "not signed in" in fedloop("logout").stdout


def test_signing_out_everywhere_ends_sessions_and_tokens(fedloop: Any) -> None:
    set_up(fedloop)
    fedloop("login", "--name", "anna", lines=(PASSWORD,))
    (token,) = json.loads(credentials_file().read_text()).values()
    child = fedloop("access-token", "create", "ci").stdout.strip()
    (url,) = json.loads(credentials_file().read_text())
    browser = OperatorClient(url, None)
    browser.sign_in("anna", PASSWORD)
    assert "everywhere" in fedloop("logout", "--everywhere").stdout
    for client in (browser, OperatorClient(url, token), OperatorClient(url, child)):
        with pytest.raises(Refused) as refused:
            client.get("/session")
        assert refused.value.status == 401


def test_ways_to_sign_in_exclude_each_other(fedloop: Any) -> None:
    with pytest.raises(UserError, match="give one"):
        fedloop("login", "--oidc", "--name", "anna")
    with pytest.raises(UserError, match="no OpenID provider"):
        fedloop("login", "--oidc")


def test_a_wrong_password_keeps_no_token(fedloop: Any) -> None:
    set_up(fedloop)
    with pytest.raises(UserError, match="wrong name or password"):
        fedloop("login", "--name", "anna", lines=("a guess",))
    assert not credentials_file().exists()
    with pytest.raises(UserError, match="nothing was given"):
        fedloop("login", "--name", "anna")
    with pytest.raises(UserError, match="not a link"):
        fedloop("user", "setup", "--name", "anna", lines=("http://127.0.0.1/#other", PASSWORD))


def test_tokens_are_found_in_the_documented_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("FEDLOOP_HOME", str(tmp_path))
    monkeypatch.setenv("FEDLOOP_TOKEN", "first")
    monkeypatch.setenv("FEDLOOP_ADMIN_TOKEN", "second")
    url = "http://127.0.0.1:8080"
    save_token(url + "/", "third")
    save_token("http://OTHER:8080", "of another")
    (tmp_path / "admin.token").write_text("fourth\n")
    assert find_credential(url).token == "first"
    monkeypatch.delenv("FEDLOOP_TOKEN")
    assert find_credential(url).token == "second"
    monkeypatch.delenv("FEDLOOP_ADMIN_TOKEN")
    assert find_credential(url).token == "third"
    assert find_credential("http://other:8080").token == "of another"
    save_token(url, None)
    for local in (url, "http://localhost:1", "https://[::1]:8080"):
        assert find_credential(local).token == "fourth"
    for elsewhere in (
        "http://192.0.2.7:8080",
        "https://localhost.example.org",
        "http://127.0.0.1.example.org",
    ):
        with pytest.raises(UserError, match="sent to an address of this machine only"):
            find_credential(elsewhere)
    (tmp_path / "admin.token").unlink()
    with pytest.raises(UserError, match="fedloop login"):
        find_credential(url)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("{}", 0o644, "other users can read it"),
        ("[1]", 0o600, "not a file of tokens"),
        ("{", 0o600, "not a file of"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_trusted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, mode: int, message: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for variable in ("FEDLOOP_TOKEN", "FEDLOOP_ADMIN_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    credentials_file().parent.mkdir()
    credentials_file().write_text(content)
    credentials_file().chmod(mode)
    with pytest.raises(UserError, match=message):
        find_credential("http://127.0.0.1:8080")


def test_the_admin_token_of_a_local_home_needs_no_sign_in(
    fedloop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOP_HOME", str(fedloop.home))
    assert "by the admin token" in fedloop("whoami").stdout
    assert read_admin_token(fedloop.home) not in fedloop("whoami", "--json").stdout
