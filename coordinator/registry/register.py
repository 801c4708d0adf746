"""Registering a version: files that lie in the blob store become the next number of a model.

    upload     each file under its hash, checked as it comes                 blob durable
    register   the documents are compared with the files                     nothing written yet
               number, files, inputs and metrics in one transaction          row durable
               and only then the answer

A crash between two of these leaves blobs that no row names, which the next start removes; what had been answered is
there. Registering the same files under the same name again answers with the version that is there, so whoever lost
an answer simply asks once more.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row

from coordinator import experiment as experiments
from coordinator import failpoints, run_report
from coordinator.db import registry
from coordinator.db import runs as runs_rows
from coordinator.db.registry import FileRow, Input, NewVersion, VersionId, VersionRow
from coordinator.errors import Refusal, UserError
from coordinator.registry import references
from coordinator.registry.contents import Content
from coordinator.registry.kinds import MODEL, PARAMS, REPORT, Kind, examine, read_manifest
from coordinator.registry.references import Reference, digest, file_path, model_name, reference
from coordinator.services import Services
from edge_client.wire import arrays
from edge_client.wire.inference import MANIFEST_NAME, MODEL_NAME


@dataclass(frozen=True)
class Sent:
    """A file as whoever registers it describes it."""

    sha256: str
    size_bytes: int


_MAIN_FILES = (PARAMS, MODEL_NAME)
_ATTEMPTS = 100


def register(
    services: Services,
    model: str,
    kind: Kind,
    files: Mapping[str, Sent],
    parents: Sequence[str] = (),
    *,
    renumber: bool = False,
) -> tuple[VersionRow, bool]:
    """Registers files that are here or were sent, by their paths, as the next version; whether it is new.

    A release says in its manifest which version it is, and must get that number; with `renumber` the manifest is
    written anew for the next one.

    Raises:
        Refusal: 409 `missing_files` with `missing`, hashes to upload first; 409 `wrong_number`, `wrong_name`; 422
            `hash_mismatch`: what was sent is something else; 404 for a parent.
        UserError: what `examine` and `references` refuse.
    """
    model_name(model)
    if not 1 <= len(files) <= references.FILES_LIMIT:
        raise UserError(
            f"{len(files)} files; a version has 1 to {references.FILES_LIMIT}", "bad_number_of_files"
        )
    for path, sent in files.items():
        file_path(path)
        digest(sent.sha256)
    with ExitStack() as stack:
        contents = _held(services, stack, files)
        version = examine(kind, contents)
        version = replace(version, inputs=[*version.inputs, *_parents(services, parents)])
        known = services.database.read(partial(_same, model=model, version=version))
        if known is not None:
            return known, False
        if kind != "inference":
            return _written(services, model, version)
        manifest = read_manifest(contents)
        if not renumber:
            if manifest.model != model:
                raise Refusal(
                    409,
                    "wrong_name",
                    f"{MANIFEST_NAME} says this is {manifest.model[:100]!r}; register it under this name",
                )
            return _written(services, model, version, manifest.version)
        for _ in range(_ATTEMPTS):
            number = services.database.read(partial(registry.next_number, model=model))
            content = replace(manifest, model=model, version=number).to_json().encode()
            with services.blobs.naming:
                stamped = services.blobs.put(content)
                stack.enter_context(services.blobs.held(stamped))
            rows = [FileRow(MANIFEST_NAME, stamped, len(content))]
            rows += [row for row in version.files if row.path != MANIFEST_NAME]
            try:
                return _written(services, model, replace(version, files=rows), number)
            except _Taken:
                continue
        raise Refusal(409, "busy", f"others kept registering versions of {model}; try again")


def register_run(services: Services, model: str, run: str) -> tuple[VersionRow, bool]:
    """Registers what a finished run came to as the next version; whether it is new.

    Raises:
        Refusal: 404 `unknown_run`, 409 `run_not_finished`.
    """
    model_name(model)
    row = services.database.read(partial(runs_rows.find, run=run))
    if row is None:
        raise Refusal(404, "unknown_run", f"there is no run {run[:100]}")
    if row.state != "finished" or row.params is None:
        raise Refusal(
            409, "run_not_finished", f"run {run} is {row.state}; only a finished run has a model to register"
        )
    with ExitStack() as stack:
        with services.blobs.naming:
            version = version_of_run(services, stack, row)
        return _written(services, model, version)


def version_of_run(services: Services, stack: ExitStack, run: Row[Any]) -> NewVersion:
    """What a run's row is as a version: its params, and beside them the documents that `fedloop run` writes.

    Its files are blobs then, held until the stack is closed. `services.blobs.naming` must be held.

    Raises:
        UserError: what `examine` refuses.
    """
    contents = {}
    for path, content in services.database.read(partial(_documents, run=run)).items():
        contents[path] = _stored(services, services.blobs.put(content))
    contents[PARAMS] = _stored(services, run.params)
    stack.enter_context(services.blobs.held(*(content.sha256 for content in contents.values())))
    return examine("params", contents)


def put(
    connection: Connection, model: str, version: NewVersion, now: datetime, number: int | None = None
) -> tuple[VersionId, bool]:
    """The version with these files, written down now if there is none; whether it is new. Its blobs must be held.

    Raises:
        Refusal: 409 `wrong_number`: another one than `number` is next.
    """
    known = registry.same_content(connection, model, version.content_sha256)
    if known is not None:
        return known, False
    given = registry.add(connection, model, version, now, number)
    if given is None:
        following = registry.next_number(connection, model)
        raise _Taken(
            409,
            "wrong_number",
            f"{MANIFEST_NAME} says this is {model}:{number}, and the next is {model}:{following}; export it with "
            f"--version {following}, or let the registry write the number: fedloop model add --renumber",
            next=following,
        )
    return given, True


def found(connection: Connection, which: Reference) -> VersionRow:
    """The version that is meant.

    Raises:
        Refusal: 404 `unknown_model`, `unknown_version` or `unknown_alias`.
    """
    model = registry.find_model(connection, which.model)
    if model is None:
        raise Refusal(404, "unknown_model", f"there is no model {which.model}")
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


class _Taken(Refusal):
    """Another number is next than the version must have."""


def _written(
    services: Services, model: str, version: NewVersion, number: int | None = None
) -> tuple[VersionRow, bool]:
    def work(connection: Connection) -> tuple[VersionRow, bool]:
        identity, is_new = put(connection, model, version, services.clock(), number)
        row = registry.find(connection, identity)
        assert row is not None
        return row, is_new

    with services.blobs.naming:
        failpoints.reach("registry.blobs_stored")
        written = services.database.write(work).result()
    failpoints.reach("registry.committed")
    services.signals.notify("events")
    return written


def _same(connection: Connection, model: str, version: NewVersion) -> VersionRow | None:
    known = registry.same_content(connection, model, version.content_sha256)
    return None if known is None else registry.find(connection, known)


def _held(services: Services, stack: ExitStack, files: Mapping[str, Sent]) -> dict[str, Content]:
    """The files as blobs, kept from being removed until the stack is closed."""
    missing = sorted({sent.sha256 for sent in files.values() if not _hold(services, stack, sent)})
    if missing:
        raise Refusal(
            409, "missing_files", f"{len(missing)} files are not here; upload them first", missing=missing
        )
    return {path: Content(services.blobs.path(s.sha256), s.sha256, s.size_bytes) for path, s in files.items()}


def _hold(services: Services, stack: ExitStack, sent: Sent) -> bool:
    """Holds a blob, and makes it one first where it was uploaded; False where it is not here as a whole.

    Raises:
        Refusal: 422 `hash_mismatch`: what was uploaded is something else, and is forgotten.
    """
    blobs, incoming = services.blobs, services.incoming_models
    path = blobs.path(sent.sha256)
    with blobs.naming:
        if path.is_file():
            if path.stat().st_size != sent.size_bytes:
                raise _other(sent, f"{path.stat().st_size} bytes")
            stack.enter_context(blobs.held(sent.sha256))
            return True
    if incoming.offset(sent.sha256) < sent.size_bytes:
        return False
    taken = path.with_name(f".model.{uuid.uuid4().hex}.tmp")
    try:
        incoming.take(sent.sha256, taken)
        found = arrays.sha256_of(taken)
        if found != sent.sha256 or taken.stat().st_size != sent.size_bytes:
            raise _other(sent, f"{taken.stat().st_size} bytes with the hash {found}")
        with blobs.naming:
            blobs.adopt(taken, sent.sha256)
            stack.enter_context(blobs.held(sent.sha256))
    finally:
        taken.unlink(missing_ok=True)
    return True


def _other(sent: Sent, found: str) -> Refusal:
    return Refusal(
        422,
        "hash_mismatch",
        f"what came as {sent.sha256} with {sent.size_bytes} bytes is {found}; send it again",
    )


def _parents(services: Services, parents: Sequence[str]) -> list[Input]:
    """Inputs that somebody names because no document does: the main file of each of these versions."""
    wanted = [reference(text) for text in parents]

    def read(connection: Connection) -> list[Input]:
        return [Input("params", _main_file(found(connection, which))) for which in wanted]

    return services.database.read(read)


def _main_file(version: VersionRow) -> str:
    named = {file.path: file.sha256 for file in version.files}
    for path in _MAIN_FILES:
        if path in named:
            return named[path]
    models = (file for file in version.files if file.path.endswith((".safetensors", ".tflite", ".onnx")))
    return max(models, key=lambda file: (file.size_bytes, file.path)).sha256


def _documents(connection: Connection, run: Row[Any]) -> dict[str, bytes]:
    model: dict[str, Any] = {**(run.prepared or {}).get("model", {}), "sha256": run.params}
    experiment = experiments.resolve(run.experiment, f"run {run.id}", "devices")
    return {
        REPORT: json.dumps(run_report.document(connection, run), indent=2).encode(),
        MODEL: json.dumps(model, indent=2).encode(),
        "experiment.toml": experiment.to_toml().encode(),
    }


def _stored(services: Services, digest: str) -> Content:
    path = services.blobs.require_whole(digest)
    return Content(path, digest, path.stat().st_size)
