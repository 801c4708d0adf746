"""The configuration of deployments: tables `[deployment.NAME]` of a TOML document.

[deployment.digits]
model = "digits@champion"
slo_ms = 50
workers = { min = 0, max = 4, threads = 1 }
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from coordinator.document_checks import Section, to_user_error, validate
from coordinator.errors import UserError
from coordinator.model_references import is_version
from coordinator.toml_files import beside, read_toml
from edge_client.files import read_regular, write_durably

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_EXPECTED_NAME = (
    "expected lower-case letters, digits, hyphens and underscores, beginning with a letter or digit"
)

Backend = Literal["auto", "litert", "torch", "channels_last", "compiled", "onnx", "packed", "keras"]


class Workers(Section):
    """Worker processes of a deployment."""

    min: Annotated[int, Field(ge=0, le=256)] = 1
    """So many stay without traffic; 0: the first request after a pause waits until one has started."""
    max: Annotated[int, Field(ge=1, le=256)] = 1
    """So many at most, which are started while requests wait too long."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Threads of one worker."""


class Generation(Section):
    """How a model that predicts tokens generates texts."""

    max_batch: Annotated[int, Field(ge=1, le=4096)] = 16
    """Texts that are generated together, at most; further ones wait."""
    block_tokens: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens of a block of the cache of keys and values; whole blocks at the beginning of a prompt are shared."""
    blocks: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Blocks of the cache; 0: as many as `max_batch` of the longest texts need."""
    prefill_chunk: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Tokens of prompts that are computed between two tokens of the others, at most."""
    deterministic: bool = False
    """An answer's bits depend on its request alone, whatever else is generated; a little slower."""
    plan: Annotated[str, Field(max_length=200)] = ""
    """How the model is split over processes, such as tp=2, pp=2 or tp=2,pp=2; empty: not at all."""

    def options(self) -> dict[str, Any]:
        return self.model_dump()


class Canary(Section):
    """A second version that answers a share of the requests that name no version."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    """As for the deployment."""
    share: Annotated[float, Field(gt=0, lt=1)]
    """Of the requests."""


class DeploymentSection(Section):
    """A model and how it is served."""

    model: Annotated[str, Field(min_length=1, max_length=4096)]
    """A version of the registry, such as digits@champion or digits:3, or the folder of a run, a pretraining, a compression or a release."""
    slo_ms: Annotated[float, Field(gt=0, le=86_400_000)] = 1000.0
    """Time limit of a request that names none; what cannot meet it is refused at once."""
    workers: Workers = Workers()
    max_batch: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Rows that are computed together, at most."""
    max_rows: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Rows of one request, at most."""
    max_queue: Annotated[int, Field(ge=1, le=10_000_000)] = 16_384
    """Rows that wait, at most; requests beyond are refused."""
    backend: Backend = "auto"
    """What computes; auto: packed weights where there are some, else the fastest by the profile, if there is one, else LiteRT for releases and PyTorch for params."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where models of PyTorch compute."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """In which numbers models of PyTorch compute."""
    idle_seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Without a request for so long, workers above `min` end."""
    generation: Generation = Generation()
    shadow: Annotated[str, Field(max_length=4096)] = ""
    """A second version that gets the same rows; its answers are compared and not returned."""
    canary: Canary | None = None

    @property
    def companion(self) -> tuple[Literal["shadow", "canary"], str, float] | None:
        """Kind, model and share of the second version, if there is one."""
        if self.canary is not None:
            return "canary", self.canary.model, self.canary.share
        return ("shadow", self.shadow, 0.0) if self.shadow else None

    def with_workers(self, least: int | None, most: int | None, threads: int | None) -> DeploymentSection:
        """The same with other numbers of workers, where given."""
        now = self.workers
        chosen = {
            "min": now.min if least is None else least,
            "max": now.max if most is None else most,
            "threads": now.threads if threads is None else threads,
        }
        return self.model_copy(update={"workers": Workers(**chosen)})


class ServingFile(Section):
    deployment: dict[str, DeploymentSection] = Field(default_factory=dict)


def load(path: Path) -> dict[str, DeploymentSection]:
    """The deployments of a file; folders that it names follow the file's folder.

    Raises:
        UserError: it cannot be read, or a value is wrong; all of them are listed.
    """
    document = read_toml(path)
    tables = document.get("deployment")
    for table in tables.values() if isinstance(tables, dict) else ():
        canary = table.get("canary") if isinstance(table, dict) else None
        for place, key in ((table, "model"), (table, "shadow"), (canary, "model")):
            value = place.get(key) if isinstance(place, dict) else None
            if isinstance(place, dict) and isinstance(value, str) and value and not is_version(value):
                place[key] = beside(path, value)
    return parse(document, str(path))


def parse(document: Mapping[str, Any], place: str) -> dict[str, DeploymentSection]:
    """The deployments of a document. Raises: UserError: as `load`."""
    found, problems = validate(ServingFile, document, find_problems, {})
    if found is None or problems:
        raise to_user_error(place, problems)
    return found.deployment


def find_problems(file: ServingFile) -> Iterable[str]:
    """A sentence for each contradiction."""
    for name, each in file.deployment.items():
        if not NAME.fullmatch(name):
            yield f"deployment.{name}: {_EXPECTED_NAME}"
        workers = each.workers
        if workers.min > workers.max:
            yield (
                f"deployment.{name}.workers.min = {workers.min} is more than max = {workers.max}; raise max or lower min"
            )
        if each.shadow and each.canary is not None:
            yield f"deployment.{name} has a shadow and a canary; keep one of them, as the figures of both would mix"
        generation = each.generation
        if generation.deterministic and generation.prefill_chunk < generation.block_tokens:
            yield (
                f"deployment.{name}.generation.prefill_chunk = {generation.prefill_chunk} is less than block_tokens = "
                f"{generation.block_tokens}, which deterministic = true needs"
            )
        if generation.plan and (
            (each.device, each.dtype) != ("cpu", "float32") or each.backend not in ("auto", "torch")
        ):
            yield (
                f"deployment.{name}.generation.plan = {generation.plan!r} is for models of PyTorch on the CPU in float32; leave out "
                "device, dtype and backend, or the plan"
            )
        if each.max_batch > each.max_queue:
            yield f"deployment.{name}.max_batch = {each.max_batch} is more than max_queue = {each.max_queue}"


class DeploymentStore:
    """The deployments that a server has, kept in a file, so that the next start has them too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, DeploymentSection]:
        """Raises: UserError: the file is damaged."""
        try:
            document = json.loads(read_regular(self._path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self._path}: cannot be read: {error}; remove it to start without deployments"
            ) from None
        return parse(document, str(self._path))

    def write(self, deployments: Mapping[str, DeploymentSection]) -> None:
        """Raises: OSError: the disk is full or not writable; what was stored remains."""
        document = ServingFile(deployment=dict(deployments)).model_dump(mode="json")
        write_durably(self._path, (json.dumps(document, indent=1) + "\n").encode())
