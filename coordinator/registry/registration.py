"""Registration of a version: files in the blob store become the next number of a model.

    upload     each file under its hash, which is checked                    blob durable
    register   compare the documents with the files                          nothing written yet
               write number, files, inputs and metrics in one transaction    row durable
               then answer

A crash in between leaves blobs that no row refers to, which the next start removes; an acknowledged version is durable.
Registration is idempotent: the same files under the same name yield the existing version, so a client that lost the
response repeats its request.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import Connection, Row

from coordinator import failpoints, model_references
from coordinator.context.services import Services
from coordinator.db import registry
from coordinator.db import runs as runs_rows
from coordinator.db.registry import FileRow, Input, ModelRow, NewVersion, VersionId, VersionRow
from coordinator.errors import Refusal, UserError
from coordinator.experiments.schema import Experiment
from coordinator.model_references import (
    PARAMS,
    Reference,
    check_file_path,
    check_model_name,
    check_sha256,
    parse_reference,
)
from coordinator.project_names import DEFAULT_PROJECT
from coordinator.registry.contents import Content
from coordinator.registry.kinds import MODEL, OWN_FILES, REPORT, Kind, examine, read_manifest
from coordinator.reports import run_report
from edge_client.files import file_sha256
from edge_client.wire import schema as schemas
from edge_client.wire.inference import InferenceManifest
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME


@dataclass(frozen=True)
class DeclaredFile:
    """A file as declared by the client."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - for requests to the API

    sha256: Annotated[str, Field(max_length=64)]
    size_bytes: Annotated[int, Field(ge=1, lt=2**63)]


_MAIN_FILES = (PARAMS, MODEL_NAME)
_ATTEMPTS = 100


def register(
    services: Services,
    model: str,
    kind: Kind,
    files: Mapping[str, DeclaredFile],
    parents: Sequence[str] = (),
    *,
    renumber: bool = False,
) -> tuple[VersionRow, bool]:
    """Registers files by path as the next version; returns it, and whether it is new.

    The manifest of a release names its version, which must be the next one; with `renumber` the manifest is rewritten for
    the next one.

    Raises:
        Refusal: 409 `missing_files` with `missing`, hashes to upload first; 409 `wrong_number`, `wrong_name`; 422
            `hash_mismatch`: an upload has another hash or size than declared; 404 for a parent.
        UserError: what `examine` and `model_references` refuse.
    """
    check_model_name(model)
    require_own_name(services, model)
    if not 1 <= len(files) <= model_references.FILES_LIMIT:
        raise UserError(
            f"{len(files)} files, a version has 1 to {model_references.FILES_LIMIT}", "bad_number_of_files"
        )
    for path in files:
        check_file_path(path)
    with ExitStack() as stack:
        contents = hold_files(services, stack, files)
        version = examine(kind, contents)
        version = replace(version, inputs=[*version.inputs, *_parents(services, parents)])
        known = services.database.read(partial(_find_identical, model=model, version=version))
        if known is not None:
            return known, False
        if kind != "inference":
            return _write(services, model, version)
        manifest = read_manifest(contents)
        if renumber:
            return _register_renumbered(services, stack, model, version, manifest)
        if manifest.model != model:
            raise Refusal(
                409,
                "wrong_name",
                f"{MANIFEST_NAME} says this is {manifest.model[:100]!r}; register it under this name",
            )
        return _write(services, model, version, manifest.version)


def require_own_name(services: Services, model: str) -> None:
    """Requires that the project may have a model of this name: releases that no registry has are those of `default`.

    Raises:
        Refusal: 409 `name_taken`.
    """
    if services.project in (None, DEFAULT_PROJECT):
        return
    owner = services.database.read(registry.owners).get(model)
    if owner is None and any(each.name.model == model for each in services.releases.releases()):
        raise registry.name_taken(model)


def register_run(services: Services, model: str, run: str) -> tuple[VersionRow, bool]:
    """Registers the final model of a finished run as the next version; returns it, and whether it is new.

    Raises:
        Refusal: 404 `unknown_run`, 409 `run_not_finished`.
    """
    check_model_name(model)
    require_own_name(services, model)
    row = services.database.read(partial(runs_rows.require, run=run))
    if row.state != "finished" or row.params is None:
        raise Refusal(
            409, "run_not_finished", f"run {run} is {row.state}; only a finished run has a model to register"
        )
    with ExitStack() as stack:
        with services.blobs.reference_lock:
            version = version_of_run(services, stack, row)
        return _write(services, model, version)


def version_of_run(services: Services, stack: ExitStack, run: Row[Any]) -> NewVersion:
    """A run as a version: its params, the documents that `fedloop run` writes beside them, and its model if it came as content.

    Its files become blobs, held until the stack is closed. The caller must hold `services.blobs.reference_lock`.

    Raises:
        UserError: what `examine` refuses.
    """
    contents = {}
    for path, content in services.database.read(partial(_documents, run=run)).items():
        contents[path] = _stored(services, services.blobs.put(content))
    contents[PARAMS] = _stored(services, run.params)
    for name, path in OWN_FILES.items() if run.own_model is not None else ():
        contents[path] = _stored(services, run.own_model[name]["sha256"])
    stack.enter_context(services.blobs.held(*(content.sha256 for content in contents.values())))
    return examine("params", contents)


def put(
    connection: Connection, model: str, version: NewVersion, now: datetime, number: int | None = None
) -> tuple[VersionId, bool]:
    """The version with these files, added if there is none, and whether it is new. Its blobs must be held.

    Raises:
        Refusal: 409 `wrong_number`: the next number is not `number`.
    """
    known = registry.same_content(connection, model, version.content_sha256)
    if known is not None:
        return known, False
    added = registry.add(connection, model, version, now, number)
    if added is None:
        following = registry.next_number(connection, model)
        raise _NumberTaken(
            409,
            "wrong_number",
            f"{MANIFEST_NAME} says this is {model}:{number}, and the next is {model}:{following}; export it with "
            f"--version {following}, or let the registry write the number: fedloop model add --renumber",
            next=following,
        )
    return added, True


def require_model(connection: Connection, name: str) -> ModelRow:
    """The model of this name. Raises: Refusal: 404 `unknown_model`."""
    model = registry.find_model(connection, name)
    if model is None:
        raise Refusal(404, "unknown_model", f"there is no model {name}")
    return model


def require_version(connection: Connection, which: Reference) -> VersionRow:
    """The version that a reference names.

    Raises:
        Refusal: 404 `unknown_model`, `unknown_version` or `unknown_alias`.
    """
    model = require_model(connection, which.model)
    if which.alias is not None and which.alias not in model.aliases:
        known = ", ".join(model.aliases) or "none"
        raise Refusal(404, "unknown_alias", f"{which.model} has no alias {which.alias}; its aliases: {known}")
    number = model.aliases[which.alias] if which.alias is not None else which.number or model.latest
    row = registry.find(connection, VersionId(which.model, number))
    if row is None:
        raise Refusal(
            404, "unknown_version", f"there is no {which.model}:{number}; the newest is {model.latest}"
        )
    return row


class _NumberTaken(Refusal):
    """The next number is not the one that the version must have."""


def _register_renumbered(
    services: Services, stack: ExitStack, model: str, version: NewVersion, manifest: InferenceManifest
) -> tuple[VersionRow, bool]:
    """Registers a release under the next number, which is written into its manifest."""
    for _ in range(_ATTEMPTS):
        number = services.database.read(partial(registry.next_number, model=model))
        content = replace(manifest, model=model, version=number).to_json().encode()
        with services.blobs.reference_lock:
            renumbered = services.blobs.put(content)
            stack.enter_context(services.blobs.held(renumbered))
        rows = [FileRow(MANIFEST_NAME, renumbered, len(content))]
        rows += [row for row in version.files if row.path != MANIFEST_NAME]
        try:
            return _write(services, model, replace(version, files=rows), number)
        except _NumberTaken:
            continue
    raise Refusal(409, "busy", f"other clients kept registering versions of {model}; try again")


def _write(
    services: Services, model: str, version: NewVersion, number: int | None = None
) -> tuple[VersionRow, bool]:
    def work(connection: Connection) -> tuple[VersionRow, bool]:
        identity, is_new = put(connection, model, version, services.clock(), number)
        row = registry.find(connection, identity)
        assert row is not None
        return row, is_new

    with services.blobs.reference_lock:
        failpoints.reach("registry.blobs_stored")
        written = services.database.write(work).result()
    failpoints.reach("registry.committed")
    services.signals.notify("events")
    return written


def _find_identical(connection: Connection, model: str, version: NewVersion) -> VersionRow | None:
    known = registry.same_content(connection, model, version.content_sha256)
    return None if known is None else registry.find(connection, known)


def hold_files(services: Services, stack: ExitStack, files: Mapping[str, DeclaredFile]) -> dict[str, Content]:
    """The files as blobs, made from their uploads if needed, and kept from being removed until the stack is closed.

    Raises:
        Refusal: 409 `missing_files` with `missing`, hashes to upload first; 422 `hash_mismatch`: an upload has another hash
            or size than declared.
        UserError: a hash is not a SHA-256.
    """
    for declared in files.values():
        check_sha256(declared.sha256)
    owned = _owned_blobs(services)
    missing = sorted(
        {declared.sha256 for declared in files.values() if not _hold(services, stack, declared, owned)}
    )
    if missing:
        raise Refusal(
            409, "missing_files", f"{len(missing)} files are missing; upload them first", missing=missing
        )
    return {path: Content(services.blobs.path(s.sha256), s.sha256, s.size_bytes) for path, s in files.items()}


def _owned_blobs(services: Services) -> Collection[str] | None:
    """The blobs that the project of these services has; None: all.

    A project must send a file of another one: whoever learned a hash would read the file otherwise.
    """
    return None if services.project is None else services.database.read(runs_rows.blobs_in_use)


def _hold(
    services: Services, stack: ExitStack, declared: DeclaredFile, owned: Collection[str] | None
) -> bool:
    """Holds a blob, created from its upload if needed; False if it is missing or incomplete.

    Raises:
        Refusal: 422 `hash_mismatch`: the upload has another hash or size than declared; it is removed.
    """
    blobs, incoming = services.blobs, services.incoming_models
    path = blobs.path(declared.sha256)
    with blobs.reference_lock:
        if path.is_file() and (owned is None or declared.sha256 in owned):
            if path.stat().st_size != declared.size_bytes:
                raise _mismatch(declared, f"{path.stat().st_size} bytes")
            stack.enter_context(blobs.held(declared.sha256))
            return True
    if incoming.offset(declared.sha256) < declared.size_bytes:
        return False
    temporary = path.with_name(f".model.{uuid.uuid4().hex}.tmp")
    try:
        incoming.take(declared.sha256, temporary)
        digest = file_sha256(temporary)
        if digest != declared.sha256 or temporary.stat().st_size != declared.size_bytes:
            raise _mismatch(declared, f"{temporary.stat().st_size} bytes with the hash {digest}")
        with blobs.reference_lock:
            blobs.adopt(temporary, declared.sha256)
            stack.enter_context(blobs.held(declared.sha256))
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _mismatch(declared: DeclaredFile, actual: str) -> Refusal:
    return Refusal(
        422,
        "hash_mismatch",
        f"the file declared as {declared.sha256} with {declared.size_bytes} bytes has {actual}; send it again",
    )


def _parents(services: Services, parents: Sequence[str]) -> list[Input]:
    """The inputs that a client declares because no document names them: the main file of each of these versions."""
    wanted = [parse_reference(text) for text in parents]

    def read(connection: Connection) -> list[Input]:
        return [Input("params", _main_file(require_version(connection, which))) for which in wanted]

    return services.database.read(read)


def _main_file(version: VersionRow) -> str:
    named = {file.path: file.sha256 for file in version.files}
    for path in _MAIN_FILES:
        if path in named:
            return named[path]
    models = (file for file in version.files if file.path.endswith((".safetensors", ".tflite", ".onnx")))
    return max(models, key=lambda file: (file.size_bytes, file.path)).sha256


def _documents(connection: Connection, run: Row[Any]) -> dict[str, bytes]:
    prepared = run.prepared or {}
    model: dict[str, Any] = {**prepared.get("model", {}), "sha256": run.params}
    if run.own_model is not None:
        model["made_from"] = run_report.own_model_hashes(run)
    schema = (prepared.get("data") or {}).get("schema")
    described = schemas.from_document(schema).to_json().encode() if schema is not None else None
    return ({} if described is None else {schemas.SCHEMA_NAME: described}) | {
        REPORT: json.dumps(run_report.make_report(connection, run), indent=2).encode(),
        MODEL: json.dumps(model, indent=2).encode(),
        "experiment.toml": Experiment.model_validate(run.experiment).to_toml().encode(),
    }


def _stored(services: Services, digest: str) -> Content:
    path = services.blobs.require_intact(digest)
    return Content(path, digest, path.stat().st_size)
