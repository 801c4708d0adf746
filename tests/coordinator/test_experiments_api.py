"""Experiments before they run: the schema for forms, every problem with its key, and who would take part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from fastapi.testclient import TestClient

from coordinator.accounts.admin_token import ensure_admin_token, read_admin_token
from coordinator.db import privacy
from coordinator.db import runs as rows
from coordinator.experiments.experiment import resolve
from coordinator.experiments.schema import Experiment
from coordinator.privacy.mechanism import Mechanism
from tests.support import device_world
from tests.support.device_world import World
from tests.support.people import app_of, bearer

ONLY_THERE: dict[str, Any] = {"data": {"dataset": "vibration", "input_shape": [8], "classes": 3}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("experiments")
    with device_world.sqlite(folder) as database, device_world.serving(folder, database) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(world: World) -> TestClient:
    home = world.services.settings.home
    ensure_admin_token(home)
    return bearer(app_of(world.services), read_admin_token(home))


def check(client: TestClient, experiment: Any, **more: Any) -> Any:
    content = json.dumps({"experiment": experiment, **more})  # ASCII, which may stand for what UTF-8 cannot
    answer = client.post(
        "/api/v1/experiments/check", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def keys_of(checked: Any) -> list[str]:
    return [each["key"] for each in checked["problems"]]


def test_every_key_of_the_schema_has_a_type_and_help(client: TestClient) -> None:
    schema = client.get("/api/v1/experiments/schema").json()
    tables = schema["experiment"]["$defs"]
    for table in ("Data", "Model", "Federation", "Local", "StrategySection", "Simulation", "Devices"):
        for key, field in tables[table]["properties"].items():
            assert field["description"], f"{table}.{key} has no help"
            assert {"type", "anyOf", "enum", "const"} & field.keys(), f"{table}.{key} has no type"
    assert tables["Federation"]["properties"]["rounds"]["minimum"] == 1
    assert schema["models"]["resnet8"]["properties"]["norm"]["enum"] == ["group", "batch"]
    assert schema["strategies"]["fedadam"]["properties"]["beta1"]["exclusiveMaximum"] == 1
    assert "digits" in schema["datasets"]


def test_all_problems_come_at_once_each_with_its_key(client: TestClient) -> None:
    wrong = {
        "sed": 1,
        "data": {"dataset": "digist", "split": "part"},
        "model": {"name": "cnn", "hidden": -1, "adapt": "lora"},
        "federation": {"rounds": "many", "client": 3, "runtimes": {"tourch": 1.0}},
        "local": {"epochs": 1, "steps": 2},
        "strategy": {"name": "fedprox", "mu": -1},
    }
    assert sorted(set(keys_of(check(client, wrong)))) == [
        "data.dataset",
        "data.split",
        "federation.client",
        "federation.rounds",
        "federation.runtimes.tourch",
        "local.epochs",
        "model.adapt",
        "model.hidden",
        "sed",
        "strategy.mu",
    ]


def test_a_value_that_this_coordinator_does_not_allow_is_a_problem_of_its_key_too(client: TestClient) -> None:
    checked = check(
        client,
        {
            "data": {"dataset": "mine:load"},
            "model": {"name": "mine:build", "init": "nothing:3"},
            "strategy": {"name": "mine:Mean"},
        },
    )
    assert keys_of(checked) == ["model.name", "data.dataset", "strategy.name", "model.init"]
    assert "--allow-code mine:build" in checked["problems"][0]["message"]
    for name in ("csv", "readings"):
        refused = check(client, {"data": {"dataset": name, "path": "/etc/passwd.csv"}})
        assert keys_of(refused) == ["data.path"], refused


def test_a_text_that_is_no_toml_is_one_problem_without_a_key(client: TestClient) -> None:
    assert keys_of(check(client, "[data\n")) == [""]
    assert keys_of(check(client, {}, sets=["no equals sign"])) == [""]


def test_the_texts_of_a_document_are_settings_that_make_it_again(client: TestClient) -> None:
    document = {
        "name": 'a "b" c',
        "seed": 2**60 + 1,
        "data": {**ONLY_THERE["data"], "exclude": ["x", "y"], "public": True},
        "federation": {"runtimes": {"torch": 1.0}, "rounds": "7"},
        "odd": [{"a": {"b": 1}}],
    }
    values = check(client, document)["values"]
    assert (values["seed"], values["data.input_shape"]) == (str(2**60 + 1), "[8]")
    sets = [f"{key}={value}" for key, value in values.items() if key != "federation.rounds"]
    again = check(client, {"federation": {"rounds": "7"}}, sets=sets)
    assert again["values"] == values


@pytest.mark.parametrize(
    "odd",
    [
        '{"name": null, "data": {"path": null}}',
        '{"devices": {"groups": [null], "labels": {"a": null}}}',
        '{"name": "\\ud800", "\\ud800": 1, "data": {"\\ud801": "\\ud802"}}',
        '{"seed": NaN, "local": {"lr": Infinity}, "federation": {"rounds": 1e999}}',
        '{"": {"": 1}, "data": [], "model": null}',
    ],
)
def test_json_that_no_toml_can_say_is_answered_all_the_same(client: TestClient, odd: str) -> None:
    answer = client.post(
        "/api/v1/experiments/check",
        content=f'{{"experiment": {odd}, "preview": true}}',
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 200, answer.text


def test_half_of_a_character_never_reaches_the_database(client: TestClient) -> None:
    odd = {"name": "\ud800", "devices": {"groups": ["a", "\udfff"], "labels": {"\ud800": "x"}}, **ONLY_THERE}
    assert sorted(keys_of(check(client, odd))) == ["devices.groups", "devices.labels", "name"]
    for path in ("/api/v1/runs", "/api/v1/statistics"):
        answer = client.post(
            path, content=json.dumps({"experiment": odd}), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 422, answer.text
    assert client.get("/api/v1/runs").status_code == 200


def test_defaults_and_keys_that_do_not_apply_are_reported(client: TestClient) -> None:
    checked = check(client, {"simulation": {"workers": 2}})
    assert checked["problems"] == []
    assert (checked["values"], checked["resolved"]["model.name"]) == ({"simulation.workers": "2"}, "cnn")
    assert checked["resolved"]["federation.rounds"] == str(Experiment().federation.rounds)
    assert checked["notices"] == ["[simulation] is ignored"]
    assert checked["preview"] is None


def test_the_preview_lists_devices_that_would_take_part_and_reasons_of_the_others(
    world: World, client: TestClient
) -> None:
    for name, datasets in (("a", {"vibration": 40}), ("b", {"vibration": 2}), ("c", {}), ("d", {})):
        world.enrol(name).check_in(datasets=datasets)
    world.enrol("e", state="pending")
    preview = check(client, ONLY_THERE, preview=True)["preview"]
    assert (preview["enrolled"], preview["matching"], preview["rows"]) == (5, 2, 42)
    assert preview["names"] == ["the a", "the b"]
    assert [(each["code"], each["devices"]) for each in preview["excluded"]] == [
        ("no_dataset", 2),
        ("pending", 1),
    ]
    assert preview["excluded"][0]["example"].startswith("the c: ")
    assert (preview["scored_by_coordinator"], preview["described"]["classes"]) == (False, 3)
    wanted = {**ONLY_THERE, "devices": {"groups": ["lab"]}}
    assert check(client, wanted, preview=True)["preview"]["matching"] == 0


def test_an_earlier_run_is_checked_as_it_ran(world: World, client: TestClient) -> None:
    experiment = resolve(
        {**ONLY_THERE, "name": "first", "federation": {"rounds": 2}}, "experiment", "devices"
    )
    document = experiment.model_dump(mode="json", exclude_none=True)
    earlier = partial(
        rows.create,
        run="early",
        name="first",
        experiment=document,
        notices=[],
        now=world.clock(),
        kind="train",
    )
    world.services.commit(earlier)
    values = check(client, {}, run="early")["values"]
    assert (values["name"], values["federation.rounds"], values["model.name"]) == ("first", "2", "mlp")
    unknown = client.post("/api/v1/experiments/check", json={"run": "nothing"})
    assert unknown.status_code == 404


PRIVATE: dict[str, Any] = {
    **ONLY_THERE,
    "federation": {"rounds": 60, "clients_per_round": 4},
    "privacy": {"mechanism": "central", "clip_norm": 0.5, "noise_multiplier": 4.0},
}


def outlook(client: TestClient, experiment: Any, **more: Any) -> Any:
    answer = client.post("/api/v1/experiments/privacy", json={"experiment": experiment, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
def test_an_outlook_tells_epsilon_round_by_round_and_where_the_budget_ends(client: TestClient) -> None:
    found = outlook(client, PRIVATE)
    free = found["forecast"]
    mechanism = Mechanism(4.0, "none", 4, 4, 60, 1e-5, "pld")
    spent = {each["rounds"]: each["epsilon"] for each in free["spent"]}
    assert found["problems"] == [] and (min(spent), max(spent)) == (1, 60) and 20 < len(spent) <= 25
    assert spent == {number: mechanism.spending().after(number).epsilon for number in spent}
    assert (free["rounds_within_budget"], free["budget"], free["mean_deviation"]) == (60, None, 0.5)
    assert free["in_words"] == mechanism.spending().after(60).in_words()
    limited = outlook(client, PRIVATE, sets=["privacy.budget=5.0"])["forecast"]
    within = limited["rounds_within_budget"]
    assert mechanism.spending().after(within).epsilon <= 5.0 < mechanism.spending().after(within + 1).epsilon
    assert limited["in_words"] == mechanism.spending().after(within).in_words()
    aimed = outlook(client, PRIVATE | {"privacy": {"mechanism": "central", "clip_norm": 1.0, "epsilon": 3.0}})
    assert aimed["forecast"]["spent"][-1]["epsilon"] == pytest.approx(3.0, abs=0.01)
    assert aimed["forecast"]["rounds_within_budget"] == 60


@pytest.mark.parametrize(
    ("sets", "key", "words"),
    [
        (["privacy.budget=0.1"], "privacy.budget", "does not suffice for one round"),
        (["privacy.delta=0.5"], "privacy.delta", "not below one over the number of clients"),
        (["privacy.epsilon=3"], "privacy.noise_multiplier", "both set"),
        (['privacy.mechanism="local"', "federation.mode=async"], "federation.mode", "does not go with"),
        (["federation.min_updates=3"], "federation.min_updates", "does not go with privacy.mechanism"),
    ],
)
def test_an_outlook_says_what_would_be_refused(
    client: TestClient, sets: list[str], key: str, words: str
) -> None:
    found = outlook(client, PRIVATE, sets=sets)
    assert found["forecast"] is None
    (problem,) = found["problems"]
    assert problem["key"] == key and words in problem["message"]


def test_an_outlook_without_privacy_is_empty_and_one_of_no_promise_is_quick(client: TestClient) -> None:
    nothing = {"problems": [], "forecast": None, "unknown": None, "secure_aggregation": None}
    for odd in (ONLY_THERE, {**ONLY_THERE, "local": {"epochs": -1}}, "[data"):
        assert outlook(client, odd) == nothing
    endless = outlook(client, PRIVATE, sets=["federation.rounds=100000", "privacy.budget=5.0"])["forecast"]
    assert len(endless["spent"]) == 2 and endless["spent"][-1]["epsilon"] > 100
    assert 0 < endless["rounds_within_budget"] < 60 and endless["earlier"] is None


def test_an_outlook_says_what_secure_aggregation_hides(client: TestClient) -> None:
    hidden = {
        **ONLY_THERE,
        "federation": {"clients": 40, "clients_per_round": 40},
        "privacy": {"secure_aggregation": True, "clip_norm": 1.0, "group_size": 8},
    }
    found = outlook(client, hidden)
    assert found["forecast"] is None and "sum of each group of 8 clients" in found["secure_aggregation"]
    odd = {**hidden, "strategy": {"name": "fedprox", "mu": -1}}
    assert outlook(client, odd)["secure_aggregation"] is None


def test_an_outlook_composes_with_earlier_runs_on_the_same_rows(world: World, client: TestClient) -> None:
    mechanism = Mechanism(4.0, "none", 4, 4, 60, 1e-5, "pld")

    def spend(at: Any) -> None:
        document = resolve(PRIVATE, "experiment", "devices").model_dump(mode="json", exclude_none=True)
        rows.create(at, "spent", "spent", document, [], world.clock())
        privacy.open_ledger(at, "spent", mechanism.to_json())
        privacy.charge(at, "spent", 40, 1.0, world.clock())

    world.services.commit(spend)
    before, after = (mechanism.spending().after(number).epsilon for number in (40, 100))
    earlier = outlook(client, PRIVATE)["forecast"]["earlier"]
    assert (earlier["dataset"], earlier["runs"]) == ("vibration", 1)
    assert (earlier["before"], earlier["after"]) == (pytest.approx(before), pytest.approx(after))


def test_a_check_leaves_no_entry_in_the_audit_log(world: World, client: TestClient) -> None:
    check(client, {})
    outlook(client, PRIVATE)
    actions = [each["action"] for each in client.get("/api/v1/audit").json()["records"]]
    assert not {"POST /experiments/check", "POST /experiments/privacy"} & set(actions)


@pytest.mark.parametrize(
    ("mechanism", "words"),
    [("distributed", "how many values the model has"), ("example", "how many rows clients have")],
)
def test_what_depends_on_devices_or_the_model_is_known_later(
    client: TestClient, mechanism: str, words: str
) -> None:
    table = PRIVATE["privacy"] | {"mechanism": mechanism, "secure_aggregation": mechanism == "distributed"}
    federation = {**PRIVATE["federation"], "runtimes": {"torch": 1}}
    nowhere = PRIVATE | {"privacy": table, "federation": federation}
    shown = outlook(client, nowhere, sets=["data.dataset=nowhere"])
    assert not shown["problems"] and shown["forecast"] is None and words in shown["unknown"]
