"""Asking for an artifact, without torch in the asking process.

The conversion runs in a process of its own (`models.export.convert`), because what it needs (torch, jax,
the converter) is slow to import, large, and nobody else's business. A request that was answered before needs none of it
where the model is ours (`models.export.answered`).

    exported = export(ExportRequest("cnn", {}, (8, 8), 10, batch_size=16), default_cache_dir())
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from edge_client.process import Launch
from edge_client.wire.strict import Unfit, parse
from models.export import answered
from models.export.answered import ARTIFACTS

TIMEOUT_SECONDS = 1800.0

_LAST_LINES = 5


class ExportError(RuntimeError):
    """The model cannot become an artifact, or the conversion failed; the message says why."""


@dataclass(frozen=True)
class ExportRequest:
    """A model and the batches it is to train on, as `models.zoo.get` takes them.

    Attributes:
        model: a name, or the user's own `package.module:build`.
        input_shape: of one example.
        batch_size: rows in a batch of the artifact; fewer may be given to it, more may not.
    """

    model: str
    options: Mapping[str, Any]
    input_shape: tuple[int, ...]
    classes: int
    input_dtype: Literal["float32", "int32"] = "float32"
    task: Literal["classification", "next_token"] = "classification"
    batch_size: int = 16

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: object) -> ExportRequest:
        """Raises Unfit where a key is missing, unknown or of the wrong kind."""
        request = parse(ExportRequest, document, "export request")
        extents = {"classes": request.classes, "batch_size": request.batch_size}
        extents |= {f"input_shape[{axis}]": extent for axis, extent in enumerate(request.input_shape)}
        for name, value in extents.items():
            if value < 1:
                raise Unfit(f"export request.{name} is {value}, expected 1 or more")
        return request


@dataclass(frozen=True)
class Exported:
    """An artifact on disk, in the cache.

    Attributes:
        cached: it was there already.
        seconds: how long the steps took: `trace`, and unless cached `convert` and `check`; none where the request was
            answered before.
    """

    tflite: Path
    manifest: Path
    cached: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)


def export(
    request: ExportRequest,
    cache_dir: Path,
    *,
    code_folder: Path | None = None,
    launch: Launch | None = None,
) -> Exported:
    """The artifact of a model, converted now or found in `cache_dir`.

    Args:
        code_folder: where a user's own `package.module` is looked for; the working directory by default.
        launch: how the process that converts is started.

    Raises:
        ExportError: the model is unknown or wrong, LiteRT cannot train it, or the conversion broke down.
    """
    _require_converter()
    where = (code_folder or Path.cwd()).resolve()
    if not where.is_dir():
        raise ExportError(f"the folder of the model's code, {where}, does not exist")
    folder, asked = cache_dir.resolve(), request.to_json()
    digest = answered.digest(asked) if answered.known(request.model) else None
    if digest is not None and (found := answered.find(folder, digest)) is not None:
        return Exported(*found, cached=True)
    document = {"request": asked, "cache_dir": str(folder)}
    launch = launch or Launch()
    try:
        done = subprocess.run(
            launch.command("-m", "models.export.convert"),
            input=json.dumps(document),
            capture_output=True,
            text=True,
            cwd=where,
            env=launch.environment(),
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ExportError(
            f"exporting {request.model} took more than {TIMEOUT_SECONDS:.0f} s and was stopped"
        ) from None
    exported = _answer(request, done, folder)
    if digest is not None and answered.digest(asked) == digest:  # nobody edited our code meanwhile
        answered.keep(folder, digest, exported.tflite, exported.manifest)
    return exported


def default_cache_dir() -> Path:
    """`$FEDLOOP_CACHE_DIR`, else `$XDG_CACHE_HOME/fedloop`, else `~/.cache/fedloop`."""
    if own := os.environ.get("FEDLOOP_CACHE_DIR"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "fedloop"


def _require_converter() -> None:
    missing = [package for package in ("torch", "litert_torch") if find_spec(package) is None]
    if missing:
        raise ExportError(
            f"exporting to LiteRT needs {' and '.join(missing)}, which this environment lacks; "
            "install them with: pip install 'fedloop[datacenter]'"
        )


def _answer(request: ExportRequest, done: subprocess.CompletedProcess[str], cache_dir: Path) -> Exported:
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ExportError(f"exporting {request.model}: {_breakdown(done)}") from None
    if "error" in answer:
        raise ExportError(f"exporting {request.model}: {answer['error']}")
    # A process that ran a user's code may name any path; only what lies in the cache is its answer.
    tflite, manifest = (cache_dir / ARTIFACTS / Path(answer[kind]).name for kind in ("tflite", "manifest"))
    return Exported(tflite, manifest, answer["cached"], answer["seconds"])


def _breakdown(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process that gave no answer ended."""
    if done.returncode < 0:
        cause = " (the machine may be out of memory)" if done.returncode == -9 else ""
        return f"the export process was killed by signal {-done.returncode}{cause}"
    last = "\n".join(done.stderr.strip().splitlines()[-_LAST_LINES:])
    return f"the export process ended with status {done.returncode} and no answer; its last words:\n{last}"
