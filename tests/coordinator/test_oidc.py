"""Sign-in at an OpenID provider: a real one, and one that lies."""

from __future__ import annotations

import json
import threading
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import typer
from fastapi.testclient import TestClient
from joserfc import jwk, jwt
from sqlalchemy import select
from typer.testing import CliRunner

from coordinator.commands.cli import app as cli
from coordinator.context.services import Services, utc_now
from coordinator.errors import UserError
from coordinator.identity import projects, tables, users
from coordinator.limits.rates import PER_ADDRESS
from coordinator.oidc import fetching
from coordinator.oidc.configuration import CALLBACK_PATH, configuration_of
from coordinator.oidc.pending import LIFETIME, PendingSignIns
from coordinator.settings import Settings
from tests.support.doorway import listening
from tests.support.openid import (
    SECRET,
    LyingProvider,
    answer_of,
    client_of_provider,
    lying_provider,
    openid_provider,
)
from tests.support.people import ORIGIN, Clock, add_user, anyone, app_of, cheap_passwords, code_of
from tests.support.services import services_in

__all__ = ["cheap_passwords"]

pytestmark = pytest.mark.usefixtures("cheap_passwords")

REDIRECT = ORIGIN + CALLBACK_PATH
CLIENTS = [client_of_provider(name, REDIRECT, "http://127.0.0.1/callback") for name in ("fedloop", "another")]
PEOPLE = {
    "7f3a": {"preferred_username": "Carla", "email": "carla@example.org", "groups": ["all", "ml-team"]},
    "90bc": {"preferred_username": "dave", "groups": ["all"]},
    "11de": {"preferred_username": "anna", "email": "anna@example.org", "groups": "watchers"},
}
ROLES = ("ml-team=data_scientist", "watchers=viewer")
KEY = jwk.generate_key("EC", "P-256", {"kid": "own", "use": "sig"}, auto_kid=False)


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    with openid_provider(CLIENTS, PEOPLE) as found:
        yield found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services_in(tmp_path_factory.mktemp("coordinator") / "home") as services:
        yield services


def with_provider(services: Services, issuer: str, **changed: Any) -> Services:
    """The services with a provider, fresh limits and no sign-ins under way."""
    values = {"oidc_client_id": "fedloop", "oidc_client_secret": SECRET, "oidc_roles": ROLES, **changed}
    settings = replace(services.settings, oidc_issuer=issuer, **values)
    return replace(services, settings=settings, pending_sign_ins=PendingSignIns())


@pytest.fixture
def services(opened: Services, issuer: str) -> Services:
    return with_provider(opened, issuer)


def page(services: Services) -> TestClient:
    """A browser on the console's page."""
    return anyone(app_of(services), Origin=ORIGIN)


def begin(client: TestClient) -> str:
    answer = client.post("/api/v1/session/oidc/begin", json={})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["authorization_url"])


def complete(client: TestClient, parameters: dict[str, str]) -> Any:
    return client.post("/api/v1/session/oidc", json=parameters)


def sign_in(client: TestClient, login: str) -> Any:
    return complete(client, answer_of(begin(client), REDIRECT, login))


# With the real provider


def test_a_user_signs_in_at_the_provider_and_gets_the_role_of_the_claim(services: Services) -> None:
    here = page(services)
    assert here.get("/api/v1/session/methods").json() == {
        "oidc": urlsplit(services.settings.oidc_issuer).netloc
    }
    session = sign_in(here, "7f3a")
    assert session.status_code == 201, session.text
    assert (session.json()["name"], session.json()["role"]) == ("carla", "data_scientist")
    assert here.get("/api/v1/session").json()["kind"] == "session"
    again = page(services)
    assert sign_in(again, "7f3a").json()["name"] == "carla"
    with services.database.engine.connect() as connection:
        bound = connection.execute(select(tables.external_accounts)).all()
    assert [(row.issuer, row.subject) for row in bound].count((services.settings.oidc_issuer, "7f3a")) == 1
    entries = services.database.read(lambda at: at.exec_driver_sql("SELECT * FROM audit").all())
    assert SECRET not in str(entries)


def test_without_a_role_nobody_gets_in_and_no_account_is_made(services: Services) -> None:
    assert code_of(sign_in(page(services), "90bc")) == (403, "oidc_no_role")
    assert services.database.read(lambda at: users.find_user(at, "dave")) is None


def test_an_account_of_the_same_name_is_never_taken_over(services: Services) -> None:
    add_user(services, "admin", "anna")
    session = sign_in(page(services), "11de").json()
    assert (session["name"], session["role"]) == ("anna@example.org", "viewer")


def test_the_role_follows_the_provider_and_a_disabled_user_stays_out(services: Services, issuer: str) -> None:
    sign_in(page(services), "7f3a")
    lowered = with_provider(services, issuer, oidc_roles=("all=viewer",))
    assert sign_in(page(lowered), "7f3a").json()["role"] == "viewer"
    services.commit(lambda at: users.change_user(at, "carla", utc_now(), disabled=True))
    try:
        assert code_of(sign_in(page(services), "7f3a")) == (401, "bad_sign_in")
    finally:
        services.commit(lambda at: users.change_user(at, "carla", utc_now(), disabled=False))


def test_the_claim_gives_roles_in_projects_and_takes_them_away(opened: Services, issuer: str) -> None:
    def memberships(*roles: str) -> dict[str, str]:
        services = with_provider(opened, issuer, oidc_roles=roles)
        answer = sign_in(page(services), "7f3a")
        assert answer.status_code == 201, answer.text
        user = services.database.read(lambda at: users.require_user(at, "carla"))
        return {"": user.role, **services.database.read(lambda at: projects.memberships(at, user.id))}

    for name in ("clinic-a", "clinic-b"):
        opened.commit(lambda at, name=name: projects.create_project(at, name, utc_now()))
    given = memberships("ml-team=operator@clinic-a", "all=viewer@clinic-a", "all=viewer@nowhere")
    assert given["clinic-a"] == "operator"
    assert "nowhere" not in given
    carla = opened.database.read(lambda at: users.require_user(at, "carla")).id
    opened.commit(lambda at: projects.set_member(at, "clinic-b", carla, "viewer"))  # by an admin
    given = memberships("nobody=viewer@clinic-a", "all=viewer")
    assert given == {"": "member", "clinic-b": "viewer", "default": "viewer"}
    assert memberships("all=auditor", "ml-team=viewer@clinic-a")[""] == "auditor"
    assert memberships("all=viewer@clinic-a")[""] == "member"
    assert memberships("all=admin")[""] == "admin"
    gone = with_provider(opened, issuer, oidc_roles=("nobody=viewer@clinic-a",))
    assert code_of(sign_in(page(gone), "7f3a")) == (403, "oidc_no_role")
    left = opened.database.read(lambda at: projects.memberships(at, carla))
    assert "clinic-a" not in left
    assert opened.database.read(lambda at: users.require_user(at, "carla")).role == "member"


def test_such_a_user_has_no_password(services: Services) -> None:
    sign_in(page(services), "7f3a")
    for password in ("*", "the password of nobody"):
        answer = page(services).post("/api/v1/session", json={"name": "carla", "password": password})
        assert code_of(answer) == (401, "bad_sign_in")


def test_an_answer_is_good_once_and_for_the_browser_that_began(services: Services) -> None:
    here, there = page(services), page(services)
    answer = answer_of(begin(here), REDIRECT, "7f3a")
    begin(there)
    assert code_of(complete(there, answer)) == (401, "oidc_state")
    assert code_of(complete(here, answer)) == (401, "oidc_state")  # it was spent
    answer = answer_of(begin(here), REDIRECT, "7f3a")
    assert complete(here, answer).status_code == 201
    assert code_of(complete(here, answer)) == (401, "oidc_state")
    second = parse_qs(urlsplit(begin(here)).query)["state"][0]
    assert code_of(complete(here, answer | {"state": second})) == (401, "oidc_code")  # the provider spent it


def test_an_answer_expires(services: Services) -> None:
    clock = Clock(utc_now())
    here = page(replace(services, clock=clock))
    answer = answer_of(begin(here), REDIRECT, "7f3a")
    clock.now += LIFETIME
    assert code_of(complete(here, answer)) == (401, "oidc_state")


def test_an_expired_token_of_the_provider_is_refused(services: Services) -> None:
    """Its tokens live for an hour; to the coordinator's clock two have passed."""
    clock = Clock(utc_now() + timedelta(hours=2))
    assert code_of(sign_in(page(replace(services, clock=clock)), "7f3a")) == (401, "id_token_expired")


def test_a_token_of_the_provider_for_another_client_is_refused(services: Services, issuer: str) -> None:
    """Both clients are real: the code of the other is redeemed with the other's credentials, as a mix-up would."""
    provider = with_provider(services, issuer, oidc_client_id="another").oidc
    assert provider is not None
    _, pending = PendingSignIns().begin(REDIRECT, None, utc_now())
    answer = answer_of(provider.authorization_url(pending, "state"), REDIRECT, "7f3a")
    token = provider.redeem(answer["code"], pending)
    assert provider.claims(token, pending, utc_now())["sub"] == "7f3a"
    ours = services.oidc
    assert ours is not None
    with pytest.raises(Exception, match="another client"):
        ours.claims(token, pending, utc_now())
    with pytest.raises(Exception, match="another sign-in"):
        provider.claims(token, replace(pending, nonce="another"), utc_now())


def test_a_refusal_of_the_provider_is_reported(services: Services) -> None:
    here = page(services)
    state = parse_qs(urlsplit(begin(here)).query)["state"][0]
    callback = {"state": state, "error": "access_denied", "iss": services.settings.oidc_issuer}
    assert code_of(complete(here, callback)) == (401, "oidc_refused")
    answer = answer_of(begin(here), REDIRECT, "7f3a")
    assert code_of(complete(here, answer | {"iss": "https://elsewhere.example"})) == (401, "oidc_issuer")


def test_a_command_signs_in_in_the_browser(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_browser(url: str) -> None:
        """As a desktop does: at once, and beside the command."""
        redirect_uri = parse_qs(urlsplit(url).query)["redirect_uri"][0]

        def person() -> None:
            httpx.get(redirect_uri, params={"state": "of another page", "code": "planted"})
            httpx.get(redirect_uri, params=answer_of(url, redirect_uri, "7f3a"))

        threading.Thread(target=person).start()

    monkeypatch.setattr(typer, "launch", open_browser)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with listening(app_of(services)) as port:
        monkeypatch.setenv("FEDLOOP_COORDINATOR", f"http://127.0.0.1:{port}")
        done = CliRunner().invoke(cli, ["login", "--oidc"])
        assert done.exit_code == 0, done.output
        assert "as carla (data_scientist)" in done.stdout
        assert "carla (data_scientist), by an access token" in CliRunner().invoke(cli, ["whoami"]).stdout


# With a provider that lies


@pytest.fixture(scope="module")
def liar() -> Iterator[LyingProvider]:
    with lying_provider() as provider:
        yield provider


@pytest.fixture
def lied_to(opened: Services, liar: LyingProvider) -> Services:
    liar.keys, liar.changed, liar.moved_to = [KEY.as_dict(private=False)], {}, ""
    return with_provider(opened, liar.issuer)


def claims_for(url: str, liar: LyingProvider, **changed: Any) -> dict[str, Any]:
    """The claims of a good token, but for what is changed; None leaves one out."""
    now = int(utc_now().timestamp())
    good = {
        "iss": liar.issuer,
        "aud": "fedloop",
        "sub": "s",
        "iat": now,
        "exp": now + 60,
        "groups": ["watchers"],
    }
    nonce = parse_qs(urlsplit(url).query)["nonce"][0]
    return {key: value for key, value in ({**good, "nonce": nonce} | changed).items() if value is not None}


def outcome(
    services: Services, liar: LyingProvider, key: Any = KEY, alg: str = "ES256", **changed: Any
) -> Any:
    here = page(services)
    url = begin(here)
    header = {"alg": alg, "kid": key.kid}
    liar.id_token = jwt.encode(header, claims_for(url, liar, **changed), key, algorithms=[alg])
    return complete(here, {"state": parse_qs(urlsplit(url).query)["state"][0], "code": "any"})


def test_a_good_token_of_that_provider_is_taken(lied_to: Services, liar: LyingProvider) -> None:
    assert outcome(lied_to, liar).status_code == 201
    assert outcome(lied_to, liar, aud=["fedloop", "another"], azp="fedloop").status_code == 201


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"iss": "https://elsewhere.example"}, "id_token_issuer"),
        ({"aud": "another"}, "id_token_audience"),
        ({"aud": ["fedloop", "another"]}, "id_token_audience"),
        ({"azp": "another"}, "id_token_audience"),
        ({"nonce": "another"}, "id_token_nonce"),
        ({"nonce": None}, "id_token_nonce"),
        ({"nonce": 7}, "id_token_nonce"),
        ({"exp": 1_000}, "id_token_expired"),
        ({"iat": 1_000}, "id_token_expired"),
        ({"iat": 2**40, "exp": 2**41}, "id_token_expired"),
        ({"nbf": 2**40}, "id_token_expired"),
        ({"exp": None}, "id_token_malformed"),
        ({"exp": "tomorrow"}, "id_token_malformed"),
        ({"sub": None}, "id_token_malformed"),
        ({"sub": {"a": 1}}, "id_token_malformed"),
    ],
    ids=str,
)
def test_a_token_with_a_wrong_claim_is_refused(
    lied_to: Services, liar: LyingProvider, changed: dict[str, Any], code: str
) -> None:
    assert code_of(outcome(lied_to, liar, **changed)) == (401, code)


def test_a_token_that_the_provider_did_not_sign_is_refused(lied_to: Services, liar: LyingProvider) -> None:
    signature = (401, "id_token_signature")
    foreign = jwk.generate_key("EC", "P-256", {"kid": "own"}, auto_kid=False)
    assert code_of(outcome(lied_to, liar, foreign)) == signature
    unknown = jwk.generate_key("EC", "P-256", {"kid": "unknown"}, auto_kid=False)
    assert code_of(outcome(lied_to, liar, unknown)) == signature
    shared = jwk.import_key(SECRET.encode() * 2, "oct", {"kid": "own"})
    assert code_of(outcome(lied_to, liar, shared, "HS256")) == signature
    liar.keys = [shared.as_dict(private=True), *liar.keys]  # a provider that publishes it
    assert code_of(outcome(with_provider(lied_to, liar.issuer), liar, shared, "HS256")) == signature


@pytest.mark.parametrize("alg", ["none", "None", "NONE"])
def test_an_unsigned_token_is_refused(lied_to: Services, liar: LyingProvider, alg: str) -> None:
    here = page(lied_to)
    url = begin(here)
    parts = [{"alg": alg, "kid": "own"}, claims_for(url, liar)]
    encoded = [urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    for signature in ("", "AAAA"):
        liar.id_token = ".".join([*encoded, signature])
        state = parse_qs(urlsplit(url).query)["state"][0]
        assert code_of(complete(here, {"state": state, "code": "any"})) == (401, "id_token_signature")
        url = begin(here)


def test_new_keys_of_the_provider_are_found(opened: Services, lied_to: Services, liar: LyingProvider) -> None:
    assert outcome(lied_to, liar).status_code == 201
    newer = jwk.generate_key("EC", "P-256", {"kid": "newer", "use": "sig"}, auto_kid=False)
    liar.keys = [newer.as_dict(private=False)]
    assert code_of(outcome(lied_to, liar, newer)) == (401, "id_token_signature")  # fetched within the minute
    assert lied_to.oidc is not None
    lied_to.oidc._monotonic = lambda: 1e12  # type: ignore[method-assign]
    assert outcome(lied_to, liar, newer).status_code == 201


@pytest.mark.parametrize(
    "changed",
    [
        {"issuer": "https://elsewhere.example"},
        {"token_endpoint": "http://elsewhere.example/token"},
        {"jwks_uri": "file:///etc/passwd"},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"token_endpoint": None},
    ],
    ids=str,
)
def test_a_discovery_document_that_leads_elsewhere_is_refused(
    lied_to: Services, liar: LyingProvider, changed: dict[str, Any]
) -> None:
    liar.changed = changed
    assert code_of(page(lied_to).post("/api/v1/session/oidc/begin", json={})) == (503, "oidc_unavailable")


def test_a_provider_that_redirects_or_answers_without_end_is_refused(
    lied_to: Services, liar: LyingProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message() -> str:
        answer = page(with_provider(lied_to, liar.issuer)).post("/api/v1/session/oidc/begin", json={})
        assert code_of(answer) == (503, "oidc_unavailable")
        return str(answer.json()["error"]["message"])

    liar.moved_to = f"{liar.issuer}/jwks"
    assert "answered 307" in message()
    liar.moved_to, liar.changed = "", {"padding": "x" * fetching.MAX_BYTES}
    assert "more than 262144 bytes" in message()
    liar.changed = {}
    monkeypatch.setattr(fetching, "DEADLINE_SECONDS", -1.0)
    assert "takes longer" in message()


# Without a sign-in


def test_a_provider_that_is_off_or_away_is_reported(opened: Services) -> None:
    off = page(opened)
    assert off.get("/api/v1/session/methods").json() == {"oidc": None}
    assert code_of(off.post("/api/v1/session/oidc/begin", json={})) == (404, "oidc_off")
    away = page(with_provider(opened, "http://127.0.0.1:9"))
    assert code_of(away.post("/api/v1/session/oidc/begin", json={})) == (503, "oidc_unavailable")


def test_a_provider_that_is_down_is_queried_again_after_a_while(
    lied_to: Services, liar: LyingProvider
) -> None:
    here = page(lied_to)
    liar.changed = {"token_endpoint": None}
    assert code_of(here.post("/api/v1/session/oidc/begin", json={})) == (503, "oidc_unavailable")
    liar.changed = {}
    assert code_of(here.post("/api/v1/session/oidc/begin", json={})) == (503, "oidc_unavailable")
    assert lied_to.oidc is not None
    lied_to.oidc._monotonic = lambda: 1e12  # type: ignore[method-assign]
    begin(here)


def test_only_our_page_and_this_machine_may_begin(lied_to: Services) -> None:
    app = app_of(lied_to)
    path = "/api/v1/session/oidc/begin"
    assert code_of(anyone(app, Origin="https://elsewhere.example").post(path, json={})) == (403, "csrf")
    assert code_of(anyone(app).post(path, json={})) == (403, "csrf")
    assert anyone(app).post(path, json={"redirect_uri": "http://127.0.0.1:4000/"}).status_code == 200
    for uri in (
        "https://elsewhere.example/",
        "http://elsewhere.example/",
        "http://127.0.0.1:4000/?a=b",
        "file:///x",
    ):
        assert code_of(anyone(app).post(path, json={"redirect_uri": uri})) == (422, "malformed")


def test_sign_ins_are_begun_at_a_limited_rate_and_are_not_in_the_audit_log(
    lied_to: Services, liar: LyingProvider
) -> None:
    assert outcome(lied_to, liar).status_code == 201
    here = page(with_provider(lied_to, liar.issuer))
    for _ in range(PER_ADDRESS):
        begin(here)
    assert code_of(here.post("/api/v1/session/oidc/begin", json={})) == (429, "too_many_guesses")
    actions = lied_to.database.read(lambda at: at.exec_driver_sql("SELECT action, stage FROM audit").all())
    assert ("POST /session/oidc/begin", "done") not in [tuple(row) for row in actions]
    assert ("POST /session/oidc", "done") in [tuple(row) for row in actions]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"oidc_issuer": ""}, "--oidc-issuer is missing"),
        ({"oidc_client_id": ""}, "needs --oidc-client-id"),
        ({"oidc_roles": ()}, "at least one --oidc-role"),
        ({"oidc_roles": ("a=admin@clinic",)}, "in all projects"),
        ({"oidc_roles": ("a=viewer@No Project",)}, "VALUE=ROLE@PROJECT"),
        ({"oidc_roles": ("a=king",)}, "VALUE=ROLE"),
    ],
    ids=str,
)
def test_incomplete_settings_are_refused(changed: dict[str, Any], problem: str) -> None:
    values = {
        "oidc_issuer": "https://a.example",
        "oidc_client_id": "b",
        "oidc_roles": ("c=viewer",),
        **changed,
    }
    with pytest.raises(UserError, match=problem):
        configuration_of(Settings(Path("home"), "sqlite://", **values))


def test_an_address_gives_a_role_only_once_it_is_verified() -> None:
    settings = Settings(
        Path("home"), "sqlite://", oidc_issuer="https://a.example", oidc_client_id="b", oidc_claim="email"
    )
    found = configuration_of(replace(settings, oidc_roles=("a@a.example=admin",)))
    assert found is not None
    assert found.roles_of({"email": "a@a.example", "email_verified": True}) == {None: "admin"}
    for verified in (False, None, "true"):
        assert found.roles_of({"email": "a@a.example", "email_verified": verified}) == {}


def test_a_claim_may_lie_inside_an_object() -> None:
    settings = Settings(
        Path("home"),
        "sqlite://",
        oidc_issuer="https://a.example",
        oidc_client_id="b",
        oidc_claim="realm_access.roles",
    )
    found = configuration_of(
        replace(settings, oidc_roles=("first=operator", "second=viewer", "a=b=viewer@c"))
    )
    assert found is not None
    assert found.roles_of({"realm_access": {"roles": ["second", "first"]}}) == {"default": "operator"}
    assert found.roles_of({"realm_access": {"roles": "a=b"}}) == {"c": "viewer"}
    assert found.roles_of({"realm_access": {"roles": [{"first": 1}]}}) == {}
    assert found.roles_of({"realm_access": "roles"}) == {}
    assert found.roles_of({}) == {}
