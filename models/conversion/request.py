"""Requests an artifact without importing torch.

The conversion runs in a separate process (`models.conversion.convert`), because its dependencies (torch, jax,
the converter) are large and slow to import. A repeated request for a built-in model
does not need that process (`models.conversion.request_cache`).

    exported = export(ExportRequest("cnn", {}, (8, 8), 10, batch_size=16), default_cache_dir())
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from edge_client.processes.process import Launch, ProcessFailed, run_once
from edge_client.wire.strict import InvalidDocument, parse
from models.conversion import request_cache
from models.conversion.request_cache import ARTIFACTS, Exported

TIMEOUT_SECONDS = 1800.0

_LAST_LINES = 5


class ExportError(RuntimeError):
    """The model cannot become an artifact, or the conversion failed; the message says why."""


@dataclass(frozen=True)
class ExportRequest:
    """A model and its batch size, with the arguments of `models.zoo.get`.

    Attributes:
        model: a name, or the user's own `package.module:build`.
        input_shape: of one example.
        batch_size: maximum number of rows in a batch.
    """

    model: str
    options: Mapping[str, Any]
    input_shape: tuple[int, ...]
    classes: int
    input_dtype: Literal["float32", "int32"] = "float32"
    task: Literal["classification", "next_token", "regression"] = "classification"
    batch_size: int = 16

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: object) -> ExportRequest:
        """Raises InvalidDocument if a key is missing, unknown or of the wrong type."""
        request = parse(ExportRequest, document, "export request")
        extents = {"classes": request.classes, "batch_size": request.batch_size}
        extents |= {f"input_shape[{axis}]": extent for axis, extent in enumerate(request.input_shape)}
        for name, value in extents.items():
            if value < 1:
                raise InvalidDocument(f"export request.{name} is {value}, expected 1 or more")
        return request


def export(
    request: ExportRequest,
    cache_dir: Path,
    *,
    code_folder: Path | None = None,
    launch: Launch | None = None,
) -> Exported:
    """The artifact of a model, converted now or found in `cache_dir`.

    Args:
        code_folder: to import a user's own `package.module` from; by default the working directory.
        launch: how to start the conversion process.

    Raises:
        ExportError: the model is unknown or invalid, LiteRT cannot train it, or the conversion failed.
    """
    _require_converter()
    where = (code_folder or Path.cwd()).resolve()
    if not where.is_dir():
        raise ExportError(f"the folder of the model's code, {where}, does not exist")
    folder, settings = cache_dir.resolve(), request.to_json()
    digest = request_cache.digest(settings) if request_cache.is_ours(request.model) else None
    if digest is not None and (found := request_cache.find(folder, digest)) is not None:
        return found
    document = {"request": settings, "cache_dir": str(folder)}
    launch = launch or Launch()
    try:
        answer = run_once(
            launch.command("-m", "models.conversion.convert"),
            TIMEOUT_SECONDS,
            document=document,
            folder=where,
            environment=launch.environment(),
        )
    except ProcessFailed as failure:
        raise ExportError(f"exporting {request.model}: {_reason(failure)}") from None
    if "error" in answer:
        raise ExportError(f"exporting {request.model}: {answer['error']}")
    # A process that ran user code may return any path; accept only files in the cache.
    tflite, manifest = (folder / ARTIFACTS / Path(answer[kind]).name for kind in ("tflite", "manifest"))
    exported = Exported(tflite, manifest, answer["cached"], answer["seconds"])
    if digest is not None and request_cache.digest(settings) == digest:  # our code did not change meanwhile
        request_cache.store(folder, digest, exported)
    return exported


def _require_converter() -> None:
    missing = [package for package in ("torch", "litert_torch") if find_spec(package) is None]
    if missing:
        raise ExportError(
            f"exporting to LiteRT needs {' and '.join(missing)}, which this environment lacks; "
            "install them with: pip install 'fedloop[datacenter]'"
        )


def _reason(failure: ProcessFailed) -> str:
    if failure.status == -signal.SIGKILL:
        return "the export process was killed by signal 9 (the machine may be out of memory)"
    last = failure.output.strip().splitlines()[-_LAST_LINES:]
    return "\n".join([f"the export process gave no answer: {failure}", *last])
