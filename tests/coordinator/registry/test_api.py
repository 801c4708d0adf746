"""The registry through the operator API: registering, reading, aliases, lineage, and what is refused."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import delete

from coordinator.accounts.admin_token import read_admin_token
from coordinator.context.services import Services
from coordinator.db import tables as db_tables
from coordinator.operator import version_files
from coordinator.registry.contents import Content, content_of
from coordinator.runs.service import RunService
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.support import model_folders as left
from tests.support.fake_devices import answering
from tests.support.services import services_in


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with services_in(tmp_path_factory.mktemp("coordinator") / "home") as opened:
        yield opened


@pytest.fixture(scope="module")
def served(services: Services) -> TestClient:
    return client_of(services)


@pytest.fixture
def admin(services: Services, served: TestClient) -> TestClient:
    """On a registry without models."""
    empty(services)
    return served


@pytest.fixture
def on_each(tmp_path: Path, database_url: str) -> Iterator[TestClient]:
    """The same on SQLite and on PostgreSQL."""
    with services_in(tmp_path / "home", database_url) as opened:
        yield client_of(opened)


def empty(services: Services) -> None:
    tables = (
        db_tables.model_alias_moves, db_tables.model_aliases, db_tables.model_metrics,
        db_tables.model_inputs, db_tables.model_files, db_tables.model_versions,
        db_tables.models,
    )  # fmt: skip
    services.database.write(lambda at: [at.execute(delete(table)) for table in tables]).result()
    services.blobs.remove([path.name for path in services.blobs.path("").iterdir()])
    services.incoming_models.clear()


def client_of(services: Services) -> TestClient:
    metrics = Metrics(services.database, services.signals)
    app = operator_app(services, RunService(services, answering), metrics)
    token = read_admin_token(services.settings.home)
    client = TestClient(
        app,
        base_url="http://127.0.0.1/api/v1",
        headers={"Authorization": f"Bearer {token}"},
        raise_server_exceptions=False,
    )
    client.get(
        "/models"
    )  # the first request completes the routes, and here each thread has a loop of its own
    return client


def code_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def requested(kind: str, contents: Mapping[str, Content], **more: Any) -> dict[str, Any]:
    files = {path: {"sha256": c.sha256, "size_bytes": c.size_bytes} for path, c in contents.items()}
    return {"kind": kind, "files": files, **more}


def upload(admin: TestClient, contents: Mapping[str, Content]) -> None:
    for content in contents.values():
        answer = admin.put(
            f"/model-files/{content.sha256}", params={"offset": 0}, content=content.place.read_bytes()
        )
        assert answer.json() == {"offset": content.size_bytes}


def add(admin: TestClient, folder: Path, name: str = "digits", **more: Any) -> Any:
    """Registers a folder; the answer."""
    kind, contents = version_files.gather(folder)
    upload(admin, contents)
    return admin.post(f"/models/{name}/versions", json=requested(kind, contents, **more))


def test_a_version_is_what_the_folder_was(on_each: TestClient, tmp_path: Path) -> None:
    params = left.pretrained(tmp_path / "run")
    made = add(on_each, tmp_path / "run")
    assert made.status_code == 201
    version = made.json()
    assert (version["version"], version["kind"], version["stage"]) == ("digits:1", "params", "pretrain")
    assert version["inputs"] == [{"relation": "data", "ref": left.DATA}]
    assert version["metrics"]["pretrain"]["test_accuracy"] == 0.9
    assert version["about"]["parameters"] == 15
    assert {file["path"] for file in version["files"]} == {
        "model.safetensors", "lineage.json", "model.json", "report.json"
    }  # fmt: skip
    assert on_each.get("/versions/digits:1").json() == version == on_each.get("/versions/digits").json()
    got = on_each.get("/versions/digits:1/files/model.safetensors")
    assert got.content == (tmp_path / "run/model.safetensors").read_bytes()
    assert got.headers["etag"] == f'"{params}"'
    part = on_each.get("/versions/digits:1/files/model.safetensors", headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, got.content[10:20])


def test_the_same_files_again_are_the_same_version(admin: TestClient, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run")
    first, again = add(admin, tmp_path / "run"), add(admin, tmp_path / "run")
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    assert add(admin, tmp_path / "run", "other").json()["version"] == "other:1"


def test_missing_files_are_named_before_anything_is_sent(admin: TestClient, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run")
    kind, contents = version_files.gather(tmp_path / "run")
    refused = admin.post("/models/digits/versions", json=requested(kind, contents))
    assert code_of(refused) == (409, "missing_files")
    assert refused.json()["error"]["missing"] == sorted(c.sha256 for c in contents.values())
    weights = contents["model.safetensors"]
    half = weights.place.read_bytes()[: weights.size_bytes // 2]
    admin.put(f"/model-files/{weights.sha256}", params={"offset": 0}, content=half)
    assert (
        code_of(admin.post("/models/digits/versions", json=requested(kind, contents)))[1] == "missing_files"
    )
    assert admin.get(f"/model-files/{weights.sha256}").json() == {"offset": len(half)}
    assert code_of(admin.get("/models/digits")) == (404, "unknown_model")


def test_other_bytes_than_announced_are_refused_and_forgotten(
    admin: TestClient, services: Services, tmp_path: Path
) -> None:
    left.pretrained(tmp_path / "run")
    kind, contents = version_files.gather(tmp_path / "run")
    weights = contents["model.safetensors"]
    upload(admin, contents)
    assert services.incoming_models.offset(weights.sha256) == weights.size_bytes
    services.incoming_models.file(weights.sha256).write_bytes(b"x" * weights.size_bytes)
    assert code_of(admin.post("/models/digits/versions", json=requested(kind, contents))) == (
        422,
        "hash_mismatch",
    )
    assert admin.get(f"/model-files/{weights.sha256}").json() == {"offset": 0}
    assert not services.blobs.path(weights.sha256).exists()


@pytest.mark.slow
def test_twenty_at_once_get_consecutive_numbers(on_each: TestClient, tmp_path: Path) -> None:
    for number in range(20):
        left.pretrained(tmp_path / str(number), number)
    answers = _together([lambda n=n: add(on_each, tmp_path / str(n)) for n in range(20)])  # type: ignore[misc]
    assert {answer.status_code for answer in answers} == {201}
    assert sorted(answer.json()["number"] for answer in answers) == list(range(1, 21))
    assert on_each.get("/models/digits").json()["latest"] == 20


def test_the_same_files_from_many_at_once_are_one_version(on_each: TestClient, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run")
    add(on_each, tmp_path / "run", "warm")  # the files are here
    kind, contents = version_files.gather(tmp_path / "run")
    body = requested(kind, contents)
    answers = _together([lambda: on_each.post("/models/digits/versions", json=body)] * 8)
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert {answer.json()["version"] for answer in answers} == {"digits:1"}


def test_lists_come_in_pages(on_each: TestClient, tmp_path: Path) -> None:
    for number in range(3):
        left.pretrained(tmp_path / str(number), number)
        add(on_each, tmp_path / str(number))
    add(on_each, tmp_path / "0", "cnn")
    page = on_each.get("/models", params={"limit": 1}).json()
    assert ([m["name"] for m in page["models"]], page["next"]) == (["cnn"], "cnn")
    rest = on_each.get("/models", params={"after": "cnn"}).json()
    assert ([m["name"] for m in rest["models"]], rest["next"]) == (["digits"], None)
    page = on_each.get("/models/digits/versions", params={"limit": 2}).json()
    assert ([v["number"] for v in page["versions"]], page["next"]) == ([3, 2], 2)
    rest = on_each.get("/models/digits/versions", params={"before": 2}).json()
    assert ([v["number"] for v in rest["versions"]], rest["next"]) == ([1], None)


def test_an_alias_moves_and_remembers(on_each: TestClient, tmp_path: Path) -> None:
    for number in range(2):
        left.pretrained(tmp_path / str(number), number)
        add(on_each, tmp_path / str(number))
    put = "/models/digits/aliases/champion"
    assert on_each.put(put, json={"version": 1}).json()["before"] is None
    assert on_each.put(put, json={"version": 2, "expected": 1}).json()["before"] == 1
    assert code_of(on_each.put(put, json={"version": 1, "expected": 1})) == (409, "alias_moved")
    assert code_of(on_each.put(put, json={"version": 3})) == (404, "unknown_version")
    assert on_each.get("/versions/digits@champion").json()["number"] == 2
    assert on_each.get("/models/digits").json()["aliases"] == {"champion": 2}
    assert on_each.delete(put).json()["before"] == 2
    assert code_of(on_each.delete(put)) == (404, "unknown_alias")
    assert code_of(on_each.get("/versions/digits@champion")) == (404, "unknown_alias")
    moves = on_each.get("/models/digits/moves", params={"alias": "champion"}).json()
    assert [(move["before"], move["number"]) for move in moves] == [(2, None), (1, 2), (None, 1)]


def test_of_many_who_expect_the_same_one_moves_the_alias(on_each: TestClient, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run")
    add(on_each, tmp_path / "run")
    put = "/models/digits/aliases/champion"
    answers = _together([lambda: on_each.put(put, json={"version": 1, "expected": 0})] * 8)
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7
    assert len(on_each.get("/models/digits/moves").json()) == 1


def test_figures_of_another_stage_are_added(admin: TestClient, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run")
    add(admin, tmp_path / "run")
    shown = admin.put("/versions/digits:1/metrics/canary", json={"figures": {"accuracy": 0.8}}).json()
    assert shown["metrics"].keys() == {"pretrain", "canary"}
    shown = admin.put("/versions/digits:1/metrics/canary", json={"figures": {"accuracy": 0.7}}).json()
    assert shown["metrics"]["canary"] == {"accuracy": 0.7}
    body = json.dumps({"figures": {"accuracy": float("nan")}})
    refused = admin.put("/versions/digits:1/metrics/canary", content=body)
    assert refused.status_code == 422


def test_a_release_gets_the_number_its_manifest_says_or_none(admin: TestClient, tmp_path: Path) -> None:
    small = left.tflite(1)
    left.release(tmp_path / "second", 2, "e" * 64, small)
    assert code_of(add(admin, tmp_path / "second")) == (409, "wrong_number")
    assert add(admin, tmp_path / "second").json()["error"]["next"] == 1
    assert code_of(add(admin, tmp_path / "second", "cnn")) == (409, "wrong_name")
    assert code_of(admin.get("/models/digits")) == (404, "unknown_model")
    left.pretrained(tmp_path / "run")
    add(admin, tmp_path / "run")
    assert add(admin, tmp_path / "second").json()["version"] == "digits:2"


def test_a_release_is_renumbered_on_request(admin: TestClient, tmp_path: Path) -> None:
    left.release(tmp_path / "release", 7, "e" * 64, left.tflite(1), model="elsewhere")
    made = add(admin, tmp_path / "release", renumber=True)
    assert made.json()["version"] == "digits:1"
    manifest = admin.get("/versions/digits:1/files/manifest.json").json()
    assert (manifest["model"], manifest["version"]) == ("digits", 1)
    again = add(admin, tmp_path / "release", renumber=True)
    assert (again.status_code, again.json()) == (200, made.json())


def test_renumbered_at_once_each_manifest_has_its_own_number(on_each: TestClient, tmp_path: Path) -> None:
    for number in range(8):
        left.release(tmp_path / str(number), 1, "e" * 64, left.tflite(number))
    makers = [lambda n=n: add(on_each, tmp_path / str(n), renumber=True) for n in range(8)]
    answers = _together(makers)  # type: ignore[arg-type]
    assert sorted(answer.json()["number"] for answer in answers) == list(range(1, 9))
    for number in range(1, 9):
        manifest = on_each.get(f"/versions/digits:{number}/files/manifest.json").json()
        assert manifest["version"] == number


@pytest.mark.parametrize(
    "name", ["", "Digits", "-a", "a" * 64, "rollouts", "a b", "a%00b", "..%2f..", "a:1", "ä"]
)
def test_names_that_cannot_be_are_refused(admin: TestClient, name: str) -> None:
    refused = admin.post(f"/models/{name}/versions", json={"kind": "tflite", "files": {}})
    assert refused.status_code in (404, 405, 422)
    assert admin.get("/models").json()["models"] == []


@pytest.mark.parametrize(
    "path", ["../up", "/etc/passwd", "a/../../b", ".hidden", "a//b", "a\\b", "", "a/b/c/d/e", "x\0y", "a/"]
)
def test_paths_that_lead_elsewhere_are_refused(admin: TestClient, tmp_path: Path, path: str) -> None:
    left.pretrained(tmp_path / "run")
    kind, contents = version_files.gather(tmp_path / "run")
    upload(admin, contents)
    wrong = {**contents, path: contents["report.json"]}
    assert code_of(admin.post("/models/digits/versions", json=requested(kind, wrong))) == (422, "bad_path")


@pytest.mark.parametrize(
    "version", ["digits:0", "digits:x", "digits:1:1", "digits@@a", "@a", "digits:99999999999", "a/b:1"]
)
def test_references_of_no_form_are_refused(admin: TestClient, version: str) -> None:
    refused = admin.get(f"/versions/{version}")
    assert code_of(refused) in [(422, "bad_reference"), (404, "not_found")]


def test_wrong_requests_are_reported(admin: TestClient, tmp_path: Path) -> None:
    assert code_of(admin.post("/models/digits/versions", json={"kind": "params"})) == (
        422,
        "bad_number_of_files",
    )
    assert code_of(admin.post("/models/digits/versions", json={"kind": "pickle"})) == (422, "malformed")
    assert code_of(admin.post("/models/digits/versions", json={"run": "nobody"})) == (404, "unknown_run")
    assert code_of(admin.put("/model-files/XYZ", params={"offset": 0}, content=b"x")) == (422, "bad_digest")
    left.pretrained(tmp_path / "run")
    assert code_of(add(admin, tmp_path / "run", parents=["nobody:1"])) == (404, "unknown_model")
    assert add(admin, tmp_path / "run").status_code == 201
    assert code_of(admin.get("/versions/digits:9")) == (404, "unknown_version")
    assert code_of(admin.get("/versions/digits:1/files/../x")) == (404, "not_found")
    assert code_of(admin.get("/versions/digits:1/files/x")) == (404, "unknown_file")


def test_rubbish_and_pickles_are_refused_as_they_are_at_import(admin: TestClient, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run")
    kind, contents = version_files.gather(tmp_path / "run")
    left.write(tmp_path, "pytorch_model.bin", pickle.dumps({"weights": [1.0]}))
    beside = {**contents, "pytorch_model.bin": content_of(tmp_path / "pytorch_model.bin")}
    digest = left.write(tmp_path, "model.onnx", b"nothing of the kind")
    left.write(tmp_path, "onnx.json", {"sha256": digest})
    rubbish = {name: content_of(tmp_path / name) for name in ("model.onnx", "onnx.json")}
    for files, sent_as, code in ((beside, kind, "extra_file"), (rubbish, "onnx", "bad_file")):
        upload(admin, files)
        assert code_of(admin.post("/models/digits/versions", json=requested(sent_as, files))) == (422, code)
    assert admin.get("/models").json()["models"] == []


def _together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls return, begun at the same moment in a thread each."""
    ready = threading.Barrier(len(calls))
    answers: list[Any] = [None] * len(calls)

    def work(place: int) -> None:
        ready.wait()
        answers[place] = calls[place]()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
