"""Jobs whose `model.init` is a folder: of Hugging Face or of a pretraining, in the coordinator's data folders only."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.context.services import Services
from coordinator.errors import UserError
from coordinator.jobs import queries
from coordinator.jobs.service import JobService
from coordinator.jobs.tables import LIVE, JobRow
from coordinator.operator import version_files
from models import zoo
from models.hugging_face.checkpoint import write
from models.pretrain.params import params_of
from tests.coordinator.test_admission import register
from tests.support.services import services_in

GPT: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2, "bias": "all", "tie": True}
PRETRAINING: dict[str, Any] = {
    "data": {"dataset": "shakespeare", "length": 16},
    "train": {"steps": 2, "batch_size": 4},
}

SIMULATION: dict[str, Any] = {"federation": {"runtimes": {"torch": 1}}}


def folder_of(path: Path) -> Path:
    """A GPT-2."""
    spec = zoo.get("gpt", input_shape=(16,), classes=80, **GPT)
    params = params_of(spec.build(1))
    shapes = {name: value.shape for name, value in params.items()}
    write(path, spec.described(), shapes, params.__getitem__, shard_bytes=8000)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a GPT-2 in several files."""
    folder_of(tmp_path / "data" / "gpt2")
    return tmp_path / "data"


@pytest.fixture
def services(tmp_path: Path, data: Path) -> Iterator[Services]:
    with services_in(tmp_path / "home", allow_paths=(data,)) as opened:
        yield opened


def queued(services: Services, init: Path | str, kind: Any = "pretraining", **model: Any) -> JobRow:
    """A job that is admitted, and does not start."""
    service = JobService(services)
    service.close()
    document = SIMULATION if kind == "simulation" else PRETRAINING
    document = {**document, "model": {"init": str(init), **model}}
    return service.create(kind, document, (), None, 0, "admin")


def refused(services: Services, init: Path | str, kind: Any = "pretraining", **model: Any) -> UserError:
    with pytest.raises(UserError) as raised:
        queued(services, init, kind, **model)
    assert not (services.settings.home / "jobs").exists()
    return raised.value


@pytest.mark.parametrize("kind", ["pretraining", "plan"])
def test_a_job_has_the_model_of_the_folder_that_it_names(kind: str, services: Services, data: Path) -> None:
    assert len(list((data / "gpt2").glob("*.safetensors"))) > 1
    model = queued(services, data / "gpt2", kind, dropout=0.1).document["model"]
    assert {key: model[key] for key in GPT} == GPT
    assert (model["name"], model["vocab"], model["dropout"], model["init"]) == (
        "gpt",
        80,
        0.1,
        str(data / "gpt2"),
    )


def test_a_folder_of_a_pretraining_is_one_too(services: Services, data: Path) -> None:
    (mine := data / "mine").mkdir()
    (mine / "model.safetensors").write_bytes(b"")
    (mine / "model.json").write_text(json.dumps({"name": "gpt", "options": GPT}))
    model = queued(services, mine).document["model"]
    assert (model["name"], model["width"], model["init"]) == ("gpt", 16, str(mine / "model.safetensors"))


def test_links_within_the_data_folders_are_followed(services: Services, data: Path) -> None:
    """The cache of huggingface_hub has links to its blobs."""
    shutil.move(data / "gpt2", data / "blobs")
    (data / "snapshot").mkdir()
    for file in (data / "blobs").iterdir():
        (data / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / file.name)
    (data / "current").symlink_to(data / "snapshot")
    for name in ("snapshot", "current"):
        assert queued(services, data / name).document["model"]["name"] == "gpt"


@pytest.mark.parametrize("kind", ["pretraining", "simulation"])
def test_a_registered_folder_is_one_too(kind: str, services: Services, data: Path) -> None:
    """Its files are copied into the job's folder."""
    register(services, "words", version_files.gather_foreign(data / "gpt2"))
    row = queued(services, "words:1", kind)
    init = services.settings.home / "jobs" / row.id / "init"
    model = row.document["model"]
    assert (model["name"], model["width"], model["vocab"], model["init"]) == ("gpt", 16, 80, str(init))
    for file in (data / "gpt2").iterdir():
        assert (init / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match=r"name = 'bert', but model.init = 'words:1' is a gpt"):
        queued(services, "words:1", kind, name="bert")


@pytest.mark.parametrize("kind", ["pretraining", "plan", "simulation"])
def test_a_folder_elsewhere_is_refused_before_it_is_read(
    kind: str, services: Services, tmp_path: Path
) -> None:
    elsewhere = folder_of(tmp_path / "elsewhere")
    (elsewhere / "config.json").unlink()
    os.mkfifo(elsewhere / "config.json")  # whoever reads it waits for ever
    (tmp_path / "data" / "link").symlink_to(elsewhere)
    absent = str(refused(services, tmp_path / "absent", kind))
    for init in (elsewhere, tmp_path / "data" / "link", tmp_path / "data" / ".." / "elsewhere"):
        error = refused(services, init, kind)
        assert error.code == "path_not_allowed"
        assert "--allow-path" in str(error) and str(tmp_path / "data") in str(error)
    assert str(refused(services, elsewhere, kind)) == absent.replace("absent", "elsewhere")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "data"]
)
def test_a_link_out_of_the_data_folders_is_refused(
    name: str, services: Services, data: Path, tmp_path: Path
) -> None:
    place = data / "gpt2" / name
    (tmp_path / "secret").mkdir()
    place.unlink(missing_ok=True)
    place.symlink_to(tmp_path / "secret")
    error = refused(services, data / "gpt2")
    assert error.code == "path_not_allowed" and f"{name} is a link to what lies in none of the" in str(error)


def test_what_is_no_regular_file_is_refused(services: Services, data: Path) -> None:
    os.mkfifo(data / "gpt2" / "vocab.txt")
    error = refused(services, data / "gpt2")
    assert error.code == "bad_file" and "vocab.txt' on the coordinator's machine: it is a pipe" in str(error)
    (data / "empty").mkdir()
    assert "it is a folder, expected a regular file" in str(refused(services, data / "empty"))
    for strange in ("~nobody-of-this-name/x", "a\0b"):
        assert refused(services, strange).code in ("path_not_allowed", "bad_file", "bad_input")


def test_a_config_that_is_not_covered_is_refused_by_its_key(services: Services, data: Path) -> None:
    config = data / "gpt2" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "activation_function": "relu"}))
    error = refused(services, data / "gpt2")
    assert "config.json: activation_function is 'relu', expected one of" in str(error)
    assert "model.name = 'bert', but model.init" in str(
        refused(services, folder_of(data / "two"), name="bert")
    )


def test_a_job_does_not_start_once_its_folder_is_not_allowed_any_more(tmp_path: Path) -> None:
    init = folder_of(tmp_path / "data" / "gpt2")
    with services_in(tmp_path / "home", allow_paths=(tmp_path / "data",)) as services:
        job = queued(services, init).id
    with services_in(tmp_path / "home", allow_paths=()) as services:
        service = JobService(services)
        service.start()
        end = time.monotonic() + 60
        while (row := services.database.read(partial(queries.require, job=job))).state in LIVE:
            assert time.monotonic() < end
            time.sleep(0.02)
        service.close()
    assert row.state == "failed"
    assert row.error is not None and f"model.init = '{init}'" in row.error and "--allow-path" in row.error
