"""Projects are tenants: on every route, what another project owns looks as if it did not exist."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import Connection, insert, select, text

from coordinator.api.permissions import OF_COORDINATOR, OF_USER, REQUIRED_ROLES
from coordinator.context.services import Services
from coordinator.db import devices, project_filter, registry, runs, tables, tokens
from coordinator.db.devices import DeviceRow
from coordinator.db.migrations import configuration
from coordinator.db.registry import FileRow, NewVersion
from coordinator.db.store import open_engine
from coordinator.db.tables import metadata
from coordinator.experiments import experiment as experiments
from coordinator.identity import projects
from coordinator.identity.principals import GRANTS, Role
from coordinator.identity.users import UserRow
from coordinator.jobs import queries as job_queries
from coordinator.jobs.service import JobService
from coordinator.jobs.tables import JobRow
from coordinator.rollouts import queries
from coordinator.rollouts.tables import MemberRow, RolloutRow
from coordinator.runs.service import RunService
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.support.databases import postgres
from tests.support.fake_devices import answering
from tests.support.people import add_user, app_of, bearer, browser, cheap_passwords, code_of, token_of
from tests.support.rollout_devices import MemoryReleases
from tests.support.services import services_in

__all__ = ["cheap_passwords"]

EXPERIMENT = experiments.resolve({"name": "digits"}, "experiment", "devices").model_dump(
    mode="json", exclude_none=True
)
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/devices/{device}/group"): {"group": "clinic"},
    ("POST", "/models/{name}/versions"): {"run": "{run}"},
    ("PUT", "/models/{name}/aliases/{alias}"): {"version": 1},
    ("PUT", "/versions/{version}/metrics/{stage}"): {"figures": {"accuracy": 0.5}},
    ("POST", "/rollouts/{rollout}/abort"): {},
    ("POST", "/rollouts/{rollout}/force"): {"device": "{device}"},
    ("POST", "/access-tokens/{token}/revoke"): {},
}
"""What a route must be sent so that it looks for the resource; `{…}` as in the path."""


IDS = ("device", "job", "run", "token", "rollout")
"""Path parameters that are random ids."""


@dataclass(frozen=True)
class World:
    """A coordinator with projects alpha, beta and `default`; alpha and beta own one resource of each kind."""

    services: Services
    app: FastAPI
    ids: Mapping[str, Mapping[str, str]]

    def member(self, role: Role, *of: str) -> UserRow:
        """A user with this role in these projects, and in no other."""
        user = add_user(self.services, role)
        if role in ("admin", "auditor"):
            return user

        def move(at: Connection) -> None:
            projects.remove_member(at, "default", user.id)
            for project in of:
                projects.set_member(at, project, user.id, role)  # type: ignore[arg-type]

        self.services.commit(move)
        return user

    def client(self, role: Role, *of: str, project: str | None = None) -> TestClient:
        client = bearer(self.app, token_of(self.services, self.member(role, *of)))
        if project is not None:
            client.headers["X-Fedloop-Project"] = project
        return client


@pytest.fixture(autouse=True)
def _without_delay(cheap_passwords: None) -> None:
    """Many users are added here."""


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.extended)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("coordinator") / "home"
    url = postgres().create() if request.param == "postgresql" else None
    with services_in(home, url) as services:
        for name in ("alpha", "beta"):
            services.commit(lambda at, name=name: projects.create_project(at, name, services.clock()))
        app = operator_app(
            services,
            RunService(services, answering),
            Metrics(services.database, services.signals),
            JobService(services),
        )
        services.signals.close()  # streams of events end at once
        yield World(services, app, {name: populate(services, name) for name in ("alpha", "beta")})
    if url is not None:
        postgres().drop(url)


def populate(services: Services, project: str) -> dict[str, str]:
    """One resource of each kind in a project; their ids by the name of the path parameter."""
    new, now, scoped = (lambda: str(uuid.uuid4())), services.clock(), services.for_project(project)
    ids = {key: new() for key in IDS} | {"name": f"net-of-{project}"}
    blob = services.blobs.put(f"params of {project}".encode())
    version = NewVersion("weights", "import", blob, {}, [FileRow("params", blob, 8)], [], {})
    device = DeviceRow(
        ids["device"], f"device-of-{project}", f"group-of-{project}", None, "active", None, new(), None, now
    )
    token = tokens.TokenRow(
        ids["token"], new(), f"group-of-{project}", 1, False, False, now, now.replace(year=now.year + 1)
    )
    job = JobRow(
        ids["job"], 0, "plan", f"job-of-{project}", "failed", {}, None, 1, 0, 1, "somebody", now, now, now, "ended",
    )  # fmt: skip
    rollout = RolloutRow(ids["rollout"], ids["name"], 1, "paused", 0, False, None, "s", {}, {}, now, now)

    def write(at: Connection) -> None:
        devices.add(at, device)
        tokens.add(at, token)
        job_queries.create(at, job)
        runs.create(at, ids["run"], f"run-of-{project}", EXPERIMENT, (), now)
        identity = registry.add(at, ids["name"], version, now)
        assert identity is not None
        registry.move_alias(at, identity, "champion", now)
        member = MemberRow(ids["rollout"], ids["device"], 0, "failed", now)
        queries.add(at, rollout, (100.0,), [member])

    scoped.commit(write)
    return {
        **ids,
        "version": f"{ids['name']}:1",
        "alias": "champion",
        "path": "params",
        "stage": "bench",
        "sha256": blob,
    }


def ask(client: TestClient, key: tuple[str, str], ids: Mapping[str, str]) -> Any:
    method, path = key
    body = BODIES.get(key)
    filled = None if body is None else {k: fill(v, ids) for k, v in body.items()}
    return client.request(method, "/api/v1" + fill(path, ids), json=filled)


def fill(template: Any, ids: Mapping[str, str]) -> Any:
    if not isinstance(template, str):
        return template
    return re.sub(r"\{(\w+)(?::path)?\}", lambda match: ids.get(match[1], "nobody"), template)


def without(text: str, ids: Mapping[str, str]) -> str:
    for name in ("version", "name", "sha256", *IDS):
        text = text.replace(ids[name], name)
    return text


@pytest.mark.parametrize("role", list(GRANTS))
def test_a_foreign_id_is_answered_exactly_as_an_unknown_one_on_every_route(role: Role, world: World) -> None:
    client = world.client(role, "beta", project="beta")
    foreign = world.ids["alpha"]
    unknown = {
        **foreign,
        **{key: str(uuid.uuid4()) for key in IDS},
        "name": "net-of-omega",
        "version": "net-of-omega:1",
        "sha256": "0" * 64,
    }
    checked = 0
    for key in REQUIRED_ROLES:
        if "{" not in key[1] or key in OF_COORDINATOR:
            continue
        answers = [ask(client, key, ids) for ids in (foreign, unknown)]
        seen = [
            (each.status_code, without(each.text, ids))
            for each, ids in zip(answers, (foreign, unknown), strict=True)
        ]
        assert seen[0] == seen[1], key
        if REQUIRED_ROLES[key] not in GRANTS[role]:
            assert code_of(answers[0]) == (403, "forbidden"), key
        elif key[1] != "/model-files/{sha256}":  # whose bytes are hashed whatever is there
            assert answers[0].status_code == 404, (key, answers[0].text)
        checked += 1
    assert checked >= 30


@pytest.mark.parametrize("role", ["viewer", "data_scientist", "auditor"])
def test_a_project_finds_its_own_resources_on_every_route_that_its_role_may_use(
    role: Role, world: World
) -> None:
    client = world.client(role, "beta", project="beta")
    for key in REQUIRED_ROLES:
        if "{" not in key[1] or key in OF_COORDINATOR or key in OF_USER or key[0] != "GET":
            continue
        answer = ask(client, key, world.ids["beta"])
        if REQUIRED_ROLES[key] not in GRANTS[role]:
            assert code_of(answer) == (403, "forbidden"), key
        else:
            has_none = key[1].startswith(("/statistics", "/jobs/{job}/files"))
            assert answer.status_code in ((404,) if has_none else (200, 409)), (key, answer.text)


def test_no_list_shows_anything_of_another_project(world: World) -> None:
    for role in ("data_scientist", "admin"):
        client = world.client(role, "beta", project="beta")
        for key in REQUIRED_ROLES:
            if key[0] != "GET" or "{" in key[1] or key in OF_COORDINATOR or key[1] == "/projects":
                continue
            path = f"{key[1]}?after=0" if key[1] == "/events" else key[1]
            shown = client.get(f"/api/v1{path}").text
            assert "of-alpha" not in shown, key
            assert not any(value in shown for value in world.ids["alpha"].values() if len(value) > 30), key
    assert "net-of-beta" in shown or "run-of-beta" in client.get("/api/v1/runs").text


def test_a_project_of_others_is_answered_as_one_that_does_not_exist_on_every_route(world: World) -> None:
    client = world.client("data_scientist", "beta")
    for key in REQUIRED_ROLES:
        seen = []
        for project in ("alpha", "omega"):
            client.headers["X-Fedloop-Project"] = project
            answer = ask(client, key, world.ids["beta"])
            assert code_of(answer) == (404, "unknown_project"), key
            seen.append(answer.text.replace(project, "…"))
        assert seen[0] == seen[1], key


def test_who_is_in_no_project_may_do_nothing_but_manage_the_own_account(world: World) -> None:
    client = world.client("operator")
    for key in REQUIRED_ROLES:
        answer = ask(client, key, world.ids["beta"])
        if key in OF_USER:
            assert answer.status_code != 403, key
        else:
            assert answer.status_code == 403, key


def test_a_user_of_two_projects_has_in_each_the_role_given_there(world: World) -> None:
    user = world.member("data_scientist", "beta")
    world.services.commit(lambda at: projects.set_member(at, "alpha", user.id, "viewer"))
    client = browser(world.app, user.name)
    assert code_of(client.get("/api/v1/runs")) == (403, "no_project")  # it must say which
    session = client.get("/api/v1/session").json()
    assert (session["project"], session["projects"]) == (None, ["alpha", "beta"])
    for project, grants in (("alpha", "viewer"), ("beta", "data_scientist")):
        session = client.get("/api/v1/session", params={"project": project}).json()
        assert (session["project"], session["role"]) == (project, grants)
    named = client.get("/api/v1/runs", headers={"X-Fedloop-Project": "alpha"}).json()
    assert [run["name"] for run in named] == ["run-of-alpha"]
    cancel = f"/api/v1/runs/{world.ids['alpha']['run']}/cancel?project=alpha"
    assert code_of(client.post(cancel)) == (403, "forbidden")


def test_a_token_for_one_project_opens_no_other_and_makes_none_for_another(world: World) -> None:
    user = world.member("operator", "alpha", "beta")
    wide = bearer(world.app, token_of(world.services, user))
    made = wide.post("/api/v1/access-tokens", json={"name": "ci", "project": "beta"}).json()
    narrow = bearer(world.app, made["token"])
    assert [run["name"] for run in narrow.get("/api/v1/runs").json()] == ["run-of-beta"]
    assert code_of(narrow.get("/api/v1/runs", headers={"X-Fedloop-Project": "alpha"})) == (
        404,
        "unknown_project",
    )
    refused = narrow.post("/api/v1/access-tokens", json={"name": "wider", "project": "alpha"})
    assert code_of(refused) == (403, "forbidden")
    child = narrow.post("/api/v1/access-tokens", json={"name": "child"}).json()
    assert child["project"] == "beta"


def test_an_admins_token_for_one_project_does_not_manage_the_coordinator(world: World) -> None:
    admin = bearer(world.app, token_of(world.services, world.member("admin")))
    made = admin.post("/api/v1/access-tokens", json={"name": "ci", "project": "beta"}).json()
    narrow = bearer(world.app, made["token"])
    assert narrow.get("/api/v1/runs").status_code == 200
    for path in ("/users", "/audit", "/projects/alpha/members"):
        assert code_of(narrow.get(f"/api/v1{path}")) == (403, "forbidden"), path


def test_nothing_changes_in_an_archived_project(world: World) -> None:
    admin = world.client("admin")
    admin.post("/api/v1/projects", json={"name": "old"})
    operator = world.client("operator", "old")
    assert operator.post("/api/v1/tokens", json={}).status_code == 201
    assert admin.patch("/api/v1/projects/old", json={"archived": True}).json()["archived_at"]
    assert operator.get("/api/v1/tokens").status_code == 200
    assert code_of(operator.post("/api/v1/tokens", json={})) == (409, "project_archived")
    refused = admin.patch("/api/v1/projects/beta", json={"archived": True})
    assert code_of(refused) == (409, "project_in_use")  # its run waits
    refused = admin.patch("/api/v1/projects/default", json={"archived": True})
    assert code_of(refused) == (409, "default_project")


def test_a_model_of_another_project_is_no_start_and_its_name_cannot_be_taken(world: World) -> None:
    client = world.client("data_scientist", "beta")
    answers = []
    for name in ("net-of-alpha", "net-of-omega"):
        body = {"experiment": {"name": "digits", "model": {"init": f"{name}:1"}}}
        answer = client.post("/api/v1/runs", json=body)
        answers.append((answer.status_code, answer.text.replace(name, "…")))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404
    alpha = world.ids["alpha"]
    file = {"sha256": alpha["sha256"], "size_bytes": len("params of alpha")}
    body = {"kind": "weights", "files": {"model.safetensors": file}}
    refused = client.post("/api/v1/models/mine/versions", json=body)
    assert code_of(refused) == (409, "missing_files")  # knowing a hash is not having the file


def test_the_audit_log_names_the_project_of_a_change(world: World) -> None:
    world.client("operator", "beta").post("/api/v1/tokens", json={"group": "audited"})
    auditor = world.client("auditor")
    for query, expected in (({"resource": "beta"}, True), ({"resource": "alpha"}, False)):
        found = auditor.get("/api/v1/audit", params={"action": "POST /tokens", **query}).json()["records"]
        resources = [each["resource"] for each in found if each["details"].get("group") == "audited"]
        assert resources == ([{"project": "beta"}] if expected else [])


def test_a_project_cannot_take_the_name_of_a_release_that_no_registry_has(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = MemoryReleases(("published", 1), ("net-of-alpha", 1))
    monkeypatch.setitem(world.services.opened.__dict__, "releases", released)
    beta, default = world.client("data_scientist", "beta"), world.client("operator", "default")
    file = {"sha256": "0" * 64, "size_bytes": 1}
    body = {"kind": "weights", "files": {"model.safetensors": file}}
    assert code_of(beta.post("/api/v1/models/published/versions", json=body)) == (409, "name_taken")
    assert code_of(beta.post("/api/v1/models/free/versions", json=body)) == (409, "missing_files")
    seen = {
        name: [each["model"] for each in world.client("viewer", name).get("/api/v1/releases").json()]
        for name in ("alpha", "beta", "default")
    }
    assert seen == {"alpha": ["net-of-alpha"], "beta": [], "default": ["published"]}
    for name in ("net-of-alpha", "net-of-omega"):
        start = default.post("/api/v1/rollouts", json={"model": name, "version": 1})
        assert code_of(start) == (404, "unknown_release")
    assert code_of(world.client("operator", "alpha").post("/api/v1/releases", json={"targets": "x"})) == (
        403,
        "forbidden",
    )


def test_every_table_belongs_to_projects_or_to_the_whole_coordinator() -> None:
    for table in metadata.tables.values():
        whole = table.name in project_filter.WHOLE_COORDINATOR
        assert whole != project_filter.is_of_projects(table), table.name


def test_a_statement_that_cannot_be_limited_is_refused(world: World) -> None:
    scoped = world.services.for_project("beta").database
    with pytest.raises(RuntimeError, match="cannot be limited"):
        scoped.read(lambda at: at.execute(text("SELECT * FROM runs")))
    with pytest.raises(RuntimeError, match="cannot be limited"):
        rows = insert(tables.models).values([{"name": "a"}, {"name": "b"}])
        scoped.write(lambda at: at.execute(rows)).result()


def test_joins_and_subqueries_are_limited_too(world: World) -> None:
    scoped = world.services.for_project("beta").database
    d = tables.devices
    inner = select(d.c.id).where(d.c.state == "active").subquery()
    joined = select(d.c.name).join(inner, inner.c.id == d.c.id)
    other = d.alias()
    crossed = select(other.c.name).select_from(d.outerjoin(other, other.c.state == d.c.state))
    for query in (joined, crossed, select(d.c.name).where(d.c.id.in_(select(inner.c.id)))):
        found = scoped.read(lambda at, query=query: at.execute(query).scalars().all())
        assert found == ["device-of-beta"]


def test_users_of_a_database_made_before_keep_their_roles_in_the_default_project(
    tmp_path: Path, database_url: str
) -> None:
    engine = open_engine(database_url)
    with engine.execution_options(writing=True).begin() as connection:
        command.upgrade(configuration(connection), "0012")
        for name, role in (("anna", "admin"), ("bob", "operator"), ("carl", "auditor")):
            values = {"name": name, "role": role, "at": "2026-11-20 12:00:00"}
            connection.execute(
                text("INSERT INTO users VALUES (:name, :name, :role, 'x', :at, :at, NULL)"), values
            )
        connection.execute(
            text(
                "INSERT INTO runs (id, name, state, experiment, notices, created_at, round) "
                "VALUES ('r', 'old', 'finished', '{}', '[]', '2026-11-20 12:00:00', 0)"
            )
        )
        connection.execute(text("INSERT INTO serials VALUES ('s1', 'ward', NULL, '2026-11-20 12:00:00')"))
    engine.dispose()
    with services_in(tmp_path / "home", database_url) as services:
        found = services.database.read(lambda at: projects.members_of(at, "default"))
        assert found == {"bob": "operator"}
        scoped = services.for_project("default").database
        assert [row.name for row in scoped.read(lambda at: runs.newest(at, 10))] == ["old"]
        group = services.database.read(lambda at: tokens.group_of_serial(at, "s1", "default"))
        assert group == "ward"
        admin = bearer(app_of(services), (services.settings.home / "admin.token").read_text().strip())
        roles = {each["name"]: each["role"] for each in admin.get("/api/v1/users").json()}
        assert roles == {"anna": "admin", "bob": "operator", "carl": "auditor"}
