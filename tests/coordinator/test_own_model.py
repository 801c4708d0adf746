"""A user's own model that comes with a run as content: what is refused, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from coordinator.context.services import Services
from coordinator.db import runs as rows
from coordinator.errors import Refusal, UserError
from coordinator.experiments.experiment import resolve
from coordinator.model_references import parse_reference
from coordinator.operator import version_files
from coordinator.registry import registration
from coordinator.registry.kinds import examine
from coordinator.registry.registration import DeclaredFile
from coordinator.runs import own_model
from coordinator.runs.own_model import OwnModel
from coordinator.runs.service import RunService
from coordinator.workers.pool import WorkerPool
from edge_client.wire import arrays
from edge_client.wire.device import BlobRef
from edge_client.wire.manifest import FileSpec, Manifest
from models.conversion import flatbuffer
from strategies.params import Params
from tests.support.artifacts import exported
from tests.support.fake_devices import answering
from tests.support.manifests import linear
from tests.support.services import services_in

CONTENT = b"no real file"
LINEAR = replace(linear(CONTENT), model="mine:build")
SHAPE: dict[str, Any] = {"input_shape": [3], "classes": 2, "input_dtype": "float32", "task": "classification"}
SECONDS = 120.0


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with services_in(tmp_path / "home") as opened:
        yield opened


def experiment(manifest: Manifest, **tables: Any) -> dict[str, Any]:
    """An experiment for the model of a manifest, on data that only devices have."""
    data = {"dataset": "vibration", "input_shape": list(manifest.input.shape), "classes": manifest.classes}
    return {
        "model": {"name": "mine:build"},
        "data": data,
        "federation": {"rounds": 1, "clients_per_round": 2},
        "local": {"batch_size": manifest.batch_size, "epochs": 1},
        **tables,
    }


def params_of(manifest: Manifest) -> Params:
    return {tensor.name: np.full(tensor.shape, 0.1, np.float32) for tensor in manifest.tensors}


def put(services: Services, artifact: bytes, manifest: Manifest, params: bytes) -> dict[str, DeclaredFile]:
    contents = {"artifact": artifact, "manifest": manifest.to_json().encode(), "params": params}
    files = {name: DeclaredFile(services.blobs.put(each), len(each)) for name, each in contents.items()}
    for name, file in files.items():
        services.incoming_models.write(file.sha256, 0, contents[name])  # as a client does
    return files


def set_up(services: Services, manifest: Manifest, params: bytes, shape: Mapping[str, Any] = SHAPE) -> Any:
    """Sets up the linear model with this manifest and params. No worker is started: what is wrong is found before."""
    files = put(services, CONTENT, manifest, params)
    own = OwnModel(**{name: BlobRef(file.sha256, file.size_bytes) for name, file in files.items()})
    requested = resolve(experiment(LINEAR), "experiment", "devices")
    folder, no_pool = services.settings.home, cast(WorkerPool, None)
    return own_model.set_up(requested, shape, 0, own, services.blobs, folder, no_pool, None)


MISMATCHES: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "another model": (lambda m: replace(m, model="other:build"), "is of the model other:build"),
    "other batches": (
        lambda m: replace(m, batch_size=5),
        "takes batches of 5, the experiment came with 4",
    ),
    "another file": (
        lambda m: replace(m, file=FileSpec("0" * 64, len(CONTENT))),
        "describes an artifact with the hash 000",
    ),
    "another size": (lambda m: replace(m, file=replace(m.file, size_bytes=1)), "with a size of 1"),
    "other rows": (
        lambda m: replace(m, input=replace(m.input, shape=(4,))),
        "was made for the input_shape [4], the data has [3]",
    ),
    "other classes": (lambda m: replace(m, classes=3), "was made for the classes 3, the data has 2"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_manifest_that_does_not_fit_is_refused(services: Services, kind: str) -> None:
    change, message = MISMATCHES[kind]
    with pytest.raises(UserError, match=r"own_model\.manifest") as raised:
        set_up(services, change(LINEAR), arrays.encode(params_of(LINEAR)))
    assert message in str(raised.value)


def test_params_of_other_shapes_or_not_finite_are_refused(services: Services) -> None:
    params = params_of(LINEAR)
    wrong: list[tuple[Any, str]] = [
        (arrays.encode({**params, "fc.bias": np.zeros(3, np.float32)}), "fc.bias"),
        (arrays.encode({"fc.bias": params["fc.bias"]}), "does not fit the model"),
        (arrays.encode({**params, "scale": np.full(3, np.nan, np.float32)}), "'scale' is not finite"),
        (b"PK\x03\x04 a pickle in a zip", "is not a safetensors file"),
    ]
    for content, message in wrong:
        with pytest.raises(UserError, match="params that came with") as raised:
            set_up(services, LINEAR, content)
        assert message in str(raised.value)


def test_a_manifest_that_is_none_is_refused(services: Services) -> None:
    digest = services.blobs.put(b"[" * 100_000)
    own = OwnModel(*[BlobRef(digest, 100_000)] * 3)
    requested = resolve(experiment(LINEAR), "experiment", "devices")
    with pytest.raises(UserError, match="is not JSON"):
        own_model.set_up(
            requested, SHAPE, 0, own, services.blobs, services.settings.home, cast(WorkerPool, None), None
        )


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "the catalog's": ({"model": {"name": "cnn"}}, "only package.module:build and .keras files travel"),
    "adapted": (
        {"model": {"name": "mine:build", "adapt": "head", "init": "mine:1"}},
        "model.adapt = 'head'",
    ),
    "no LiteRT": ({"federation": {"runtimes": {"torch": 1.0}}}, "add litert"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_an_experiment_that_cannot_have_its_model_as_content_is_refused(
    services: Services, kind: str
) -> None:
    tables, message = UNFIT[kind]
    with pytest.raises(UserError) as raised:
        own_model.require_fit(resolve(experiment(LINEAR, **tables), "experiment", "devices"))
    assert raised.value.code == "own_model_unfit" and message in str(raised.value)


def test_files_that_were_not_sent_or_are_others_are_refused(services: Services) -> None:
    service = RunService(services, answering)
    files = put(services, CONTENT, LINEAR, arrays.encode(params_of(LINEAR)))
    absent = {**files, "artifact": DeclaredFile("a" * 64, 10)}
    with pytest.raises(Refusal) as raised:
        service.create(experiment(LINEAR), own_files=absent)
    assert (raised.value.code, raised.value.details) == ("missing_files", {"missing": ["a" * 64]})

    services.incoming_models.write("a" * 64, 0, b"tampered!!")
    with pytest.raises(Refusal) as raised:
        service.create(experiment(LINEAR), own_files=absent)
    assert (raised.value.status, raised.value.code) == (422, "hash_mismatch")
    assert services.database.read(rows.live) == []


def test_files_of_a_run_that_waits_are_kept_until_it_is_prepared(services: Services) -> None:
    files = put(services, CONTENT, LINEAR, arrays.encode(params_of(LINEAR)))
    create = partial(
        rows.create,
        run="r",
        name="n",
        experiment={},
        notices=[],
        now=services.clock(),
        own_model={
            name: {"sha256": each.sha256, "size_bytes": each.size_bytes} for name, each in files.items()
        },
    )
    services.database.write(create).result()
    assert services.database.read(rows.blobs_in_use) == {each.sha256 for each in files.values()}


def ended(services: Services, artifact: bytes, manifest: Manifest, **tables: Any) -> Any:
    """The row of a run with this model, on devices that answer at once, after its end."""
    params = arrays.encode(params_of(manifest))
    files = put(services, artifact, manifest, params)
    service = RunService(services, answering)
    run = service.create(experiment(manifest, **tables), own_files=files)
    assert service.join(run, SECONDS)
    return services.database.read(partial(rows.find, run=run))


@pytest.mark.slow
def test_an_artifact_is_checked_and_trained_without_code_and_recorded_by_hash(
    services: Services, tmp_path: Path
) -> None:
    found, described = exported("logreg")
    manifest, artifact = replace(described, model="mine:build"), found.tflite.read_bytes()
    model = {"name": "mine:build", "register": "mine"}

    run = ended(services, artifact, manifest, model=model)

    assert (run.state, run.error) == ("finished", None)
    assert run.prepared["runtimes"] == ["litert"]
    assert any("'mine:build': only LiteRT devices take part" in notice for notice in run.notices)
    version = services.database.read(partial(registration.require_version, which=parse_reference("mine:1")))
    hashes = {file.path: file.sha256 for file in version.files}
    assert hashes["own-model.tflite"] == arrays.sha256(artifact)
    assert version.about["model"]["made_from"] == {
        "artifact_sha256": arrays.sha256(artifact),
        "manifest_sha256": hashes["own-model.json"],
        "params_sha256": arrays.sha256(arrays.encode(params_of(manifest))),
    }

    folder = tmp_path / "version"
    folder.mkdir()
    for file in version.files:
        (folder / file.path).write_bytes(services.blobs.path(file.sha256).read_bytes())
    kind, contents = version_files.gather(folder)
    assert {path: content.sha256 for path, content in contents.items()} == hashes
    assert examine(kind, contents).about == version.about
    (folder / "own-model.tflite").write_bytes(b"another")
    with pytest.raises(UserError, match=r"made_from\.artifact_sha256") as raised:
        examine(*version_files.gather(folder))
    assert raised.value.code == "hash_mismatch"


@pytest.mark.slow
def test_an_artifact_that_computes_something_else_or_may_loop_is_refused(services: Services) -> None:
    found, described = exported("logreg")
    manifest, artifact = replace(described, model="mine:build"), found.tflite.read_bytes()
    lying = replace(manifest, golden=replace(manifest.golden, loss=manifest.golden.loss + 1))
    assert "self-test failed: train gave loss" in ended(services, artifact, lying).error

    looping = _with_operator(artifact, schema.BuiltinOperator.WHILE)
    changed = replace(manifest, file=FileSpec(arrays.sha256(looping), len(looping)))
    assert "WHILE is not among the operations" in ended(services, looping, changed).error

    broken = b"TFL3" * 100
    changed = replace(manifest, file=FileSpec(arrays.sha256(broken), len(broken)))
    assert ended(services, broken, changed).state == "failed"


def _with_operator(artifact: bytes, code: int) -> bytes:
    """The file with this operation in place of its first one."""
    model = flatbuffer.read(artifact)
    model.operatorCodes[0].builtinCode = model.operatorCodes[0].deprecatedBuiltinCode = code
    builder = flatbuffers.Builder(len(artifact))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())
