"""What an experiment that came over the operator API may name: code, files and versions; the rest is refused unread."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.context.services import Services
from coordinator.db import runs as rows
from coordinator.errors import Refusal, UserError
from coordinator.experiments.experiment import resolve
from coordinator.operator import version_files
from coordinator.registry import registration
from coordinator.registry.registration import DeclaredFile
from coordinator.runs import admission
from coordinator.runs.service import RunService
from edge_client.files import READ_LIMIT_BYTES
from edge_client.wire import arrays
from tests.coordinator.registry.test_api import client_of, code_of
from tests.support import model_folders as left
from tests.support.fake_devices import answering
from tests.support.services import services_in


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Services]:
    home = tmp_path_factory.mktemp("coordinator") / "home"
    with services_in(home, data_dir=data, allow_code=("mine:build", "mine:load")) as opened:
        yield opened


def admitted(services: Services, **tables: Any) -> Any:
    return admission.admit(resolve(tables, "experiment", "devices"), services)


def refused(services: Services, **tables: Any) -> UserError:
    """The refusal of an experiment; no run is made of it."""
    with pytest.raises(UserError) as raised:
        RunService(services, answering).create(tables)
    assert services.database.read(rows.live) == []
    return raised.value


CODE = [
    {"model": {"name": "torch.hub:load", "repo_or_dir": "/tmp", "model": "evil", "source": "local"}},
    {"model": {"name": "os:system"}},
    {"model": {"name": "mine:load_more"}},
    {"model": {"name": "mine.sub:build"}},
    {"model": {"name": "other.mine:build"}},
    {"model": {"name": "mine:build:x"}},
    {"model": {"name": " mine:build"}},
    {"model": {"name": "mine:build.__globals__"}},
    {"data": {"dataset": "os:abort"}},
    {"data": {"dataset": "mine:other", "input_shape": [4], "classes": 2}},
    {"strategy": {"name": "os:system"}},
    {"strategy": {"name": "mine:build:x"}},
    {"strategy": {"name": "/tmp/mine.py:build"}},
    {"model": {"name": "/tmp/mine.py:build"}},
]


@pytest.mark.parametrize("tables", CODE, ids=lambda tables: str(next(iter(tables.values()))))
def test_code_that_is_not_listed_is_refused_with_what_to_do(
    services: Services, tables: dict[str, Any]
) -> None:
    error = refused(services, **tables)
    (table, options), *_ = tables.items()
    name = options.get("name") or options["dataset"]
    assert error.code == "code_not_allowed"
    for words in (f"{table}.", repr(name), f"fedloop serve --allow-code {name}"):
        assert words in str(error)


NESTED = [
    {"model": {"name": "adapted", "base": "os:system", "base_options": {}, "adapt": "head", "backbone": "/dev/zero"}},
    {"model": {"name": "cnn", "hidden": "os:system"}},
    {"model": {"name": "cnn", "teacher": "os:system"}},
    {"model": {"name": "cnn", "adapt": "os:system", "init": "digits:1"}},
    {"model": {"name": "cnn", "init": {"module": "os:system"}}},
    {"data": {"dataset": "os.path:join:x"}},
    {"data": {"dataset": "mine:build.__globals__"}},
    {"data": {"dataset": "digits", "partition": "os:system"}},
    {"data": {"dataset": "digits(os:abort)"}},
    {"strategy": {"name": "fedavg", "weighting": "os:system"}},
    {"data": {"dataset": "digits", "tokenizer": "os:system"}},
]  # fmt: skip


@pytest.mark.parametrize("tables", NESTED, ids=str)
def test_no_other_key_is_a_way_to_code(services: Services, tables: dict[str, Any]) -> None:
    assert refused(services, **tables).code == "bad_input"


def test_listed_code_the_catalog_and_installed_models_are_admitted(services: Services) -> None:
    for name in ("mine:build", "cnn", "logreg"):
        assert admitted(services, model={"name": name}).model.name == name
    assert admitted(services, data={"dataset": "mine:load"}).data.dataset == "mine:load"


def test_a_model_that_came_as_content_is_neither_imported_nor_opened(services: Services) -> None:
    for model in (
        {"name": "os:system"},
        {"name": "/etc/net.keras"},
        {"name": "os:system", "init": "/etc/shadow"},
    ):
        tables = {"model": model}
        requested = resolve(tables, "experiment", "devices")
        assert admission.admit(requested, services, comes_with_model=True) == requested
        assert admission.init_params(requested, services, comes_with_model=True) is None
    for tables in ({"data": {"dataset": "os:abort"}}, {"data": {"dataset": "csv", "path": "/etc/shadow"}}):
        with pytest.raises(UserError, match=r"os:abort|/etc/shadow"):
            requested = resolve({"model": {"name": "mine:other"}, **tables}, "experiment", "devices")
            admission.admit(requested, services, comes_with_model=True)


def test_a_run_whose_code_is_not_listed_any_more_does_not_go_on(tmp_path: Path) -> None:
    experiment = resolve({"model": {"name": "was:allowed"}}, "experiment", "devices")
    document = experiment.model_dump(mode="json", exclude_none=True)
    with services_in(tmp_path / "home") as services:
        create = partial(
            rows.create, run="r", name="n", experiment=document, notices=[], now=services.clock()
        )
        services.database.write(create).result()
        service = RunService(services, answering)
        service.start()
        assert service.join("r", 60)
        found = services.database.read(partial(rows.find, run="r"))
    assert found is not None and found.state == "failed"
    assert "fedloop serve --allow-code was:allowed" in found.error


@pytest.fixture
def special(tmp_path: Path, data: Path) -> dict[str, Path]:
    """Paths that are no file in the data folder."""
    os.mkfifo(data / "pipe.csv")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(data / "socket.csv"))
    (data / "folder.csv").mkdir()
    (data / "token.csv").symlink_to(tmp_path / "outside.csv")
    (tmp_path / "outside.csv").write_text("secret,label\n1,2\n")
    (data / "out").symlink_to(tmp_path)
    (data / "round.csv").symlink_to(data / "round.csv")
    (data / "zero.csv").symlink_to("/dev/zero")
    with (data / "huge.csv").open("wb") as file:
        file.truncate(READ_LIMIT_BYTES + 1)
    yield {
        "device": Path("/dev/zero"), "users": Path("/etc/shadow"), "process": Path("/proc/self/environ"),
        "above": data / ".." / "outside.csv", "absent outside": tmp_path / "none.csv",
        "link to a file": data / "token.csv", "link to a folder": data / "out" / "outside.csv",
        "link to a device": data / "zero.csv", "through a process": Path("/proc/self/cwd/x.csv"),
        "pipe": data / "pipe.csv", "socket": data / "socket.csv", "folder": data / "folder.csv",
        "circle": data / "round.csv", "absent": data / "none.csv", "huge": data / "huge.csv", "data folder": data,
    }  # fmt: skip
    for path in data.iterdir():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


OUTSIDE = (
    "device", "users", "process", "above", "absent outside", "link to a file", "link to a folder",
    "link to a device", "through a process",
)  # fmt: skip
INSIDE = {
    "pipe": "it is a pipe", "socket": "it is a socket", "folder": "it is a folder", "data folder": "it is a folder",
    "circle": "symbolic links", "absent": "No such file", "huge": "expected at most",
}  # fmt: skip


def naming(key: str, path: Path) -> dict[str, dict[str, Any]]:
    """An experiment that names the file in this key."""
    if key == "data.path":
        return {"data": {"dataset": "csv", "path": str(path)}}
    return {"model": {"name": "cnn", "init": str(path)}}


@pytest.mark.parametrize("key", ["data.path", "model.init"])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_files_outside_of_the_data_folders_are_refused(
    services: Services, special: dict[str, Path], data: Path, key: str, kind: str
) -> None:
    error = refused(services, **naming(key, special[kind]))
    assert error.code == "path_not_allowed"
    for words in (key, str(data), "--allow-path"):
        assert words in str(error)


@pytest.mark.parametrize("key", ["data.path", "model.init"])
@pytest.mark.parametrize("kind", INSIDE)
def test_a_file_that_is_not_regular_or_too_large_is_refused(
    services: Services, special: dict[str, Path], key: str, kind: str
) -> None:
    error = refused(services, **naming(key, special[kind]))
    assert error.code == "bad_file"
    assert key in str(error) and INSIDE[kind] in str(error)


def test_a_run_says_how_to_start_from_a_folder(services: Services, data: Path) -> None:
    (data / "gpt2").mkdir()
    (data / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    error = refused(services, model={"name": "gpt", "init": str(data / "gpt2")}, data={"dataset": "shakespeare"},
                    federation={"runtimes": {"torch": 1}})  # fmt: skip
    assert error.code == "bad_file" and "it is a folder, expected a regular file" in str(error)
    assert "fedloop pretrain import DIR --out NEW, then fedloop model add NEW" in str(error)


def test_a_keras_file_is_a_file_as_any(services: Services, data: Path) -> None:
    outside = {"name": "/etc/net.keras"}
    assert refused(services, model=outside).code == "path_not_allowed"
    assert refused(services, model={"name": str(data / "net.keras")}).code == "bad_file"
    assert refused(services, model={"name": "os:system.keras"}).code == "path_not_allowed"


def test_a_regular_file_is_admitted_also_by_a_link_within_the_folder(services: Services, data: Path) -> None:
    (data / "rows.csv").write_text("x,label\n1,2\n")
    (data / "current.csv").symlink_to(data / "rows.csv")
    for name in ("rows.csv", "current.csv"):
        tables = {"dataset": "csv", "path": str(data / name)}
        assert admitted(services, data=tables).data.path == str(data / name)


def test_without_data_folders_no_file_is_admitted(tmp_path: Path) -> None:
    with services_in(tmp_path / "home") as services:
        error = refused(services, data={"dataset": "csv", "path": "/etc/hostname"})
    assert error.code == "path_not_allowed"
    assert "reads none that experiments name" in str(error)


def test_absent_files_elsewhere_are_reported_like_present_ones(services: Services) -> None:
    absent, present = (
        str(refused(services, data={"dataset": "csv", "path": path}))
        for path in ("/etc/absent", "/etc/hostname")
    )
    assert absent.replace("absent", "hostname") == present


def test_a_version_of_the_registry_is_where_a_model_begins(services: Services, tmp_path: Path) -> None:
    left.pretrained(tmp_path / "run")
    register(services, "digits", version_files.gather(tmp_path / "run"))
    client = client_of(services)
    client.put("/models/digits/aliases/champion", json={"version": 1})

    found = admitted(services, model={"name": "cnn", "init": "digits@champion"})

    assert found.model.init == "digits:1"
    assert admission.init_params(found, services) == (tmp_path / "run" / "model.safetensors").read_bytes()
    for init in ("digits:2", "digits@other", "none:1"):
        with pytest.raises(Refusal) as raised:
            admitted(services, model={"name": "cnn", "init": init})
        assert raised.value.status == 404


def test_imported_weights_in_several_files_are_where_a_model_begins(
    services: Services, tmp_path: Path
) -> None:
    (folder := tmp_path / "imported").mkdir()
    shards = {
        "a.safetensors": {"v": np.array([1, 2], np.float32)},
        "b.safetensors": {"w": np.array([[3]], np.float32)},
    }
    for file, tensors in shards.items():
        (folder / file).write_bytes(arrays.encode(tensors))
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {"v": "a.safetensors", "w": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    register(services, "words", version_files.gather_foreign(folder))

    content = admission.init_params(admitted(services, model={"name": "cnn", "init": "words:1"}), services)

    assert content is not None
    assert {name: value.tolist() for name, value in arrays.decode(content).items()} == {
        "v": [1, 2],
        "w": [[3]],
    }


def register(services: Services, name: str, gathered: version_files.Gathered) -> None:
    kind, contents = gathered
    for content in contents.values():
        services.incoming_models.write(content.sha256, 0, content.place.read_bytes())
    sent = {path: DeclaredFile(content.sha256, content.size_bytes) for path, content in contents.items()}
    registration.register(services, name, kind, sent)


def test_the_api_answers_with_a_code(services: Services) -> None:
    client = client_of(services)
    for tables, code in (
        ({"model": {"name": "os:system"}}, "code_not_allowed"),
        ({"model": {"name": "cnn", "init": "/dev/zero"}}, "path_not_allowed"),
    ):
        assert code_of(client.post("/runs", json={"experiment": tables})) == (422, code)
    by_settings = client.post("/runs", json={"experiment": {}, "sets": ["data.dataset=os:abort"]})
    as_text = client.post("/runs", json={"experiment": '[model]\nname = "os:abort"\n'})
    assert code_of(by_settings) == code_of(as_text) == (422, "code_not_allowed")
