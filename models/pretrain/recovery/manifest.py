"""The folder of a checkpoint and its manifest, about.json: which training it is of, and the hashes of its files.

    checkpoints/step-00000050/       a .safetensors file of each process (`models.pretrain.recovery.shards`), and about.json
    checkpoints/step-00000100.tmp/   being written; leftovers of a killed process are removed at the next start
    checkpoints/step-00000150.damaged/   set aside

A checkpoint is complete when its folder has its final name. The manifest has the SHA-256 of every file and of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from edge_client.files import file_sha256
from models.options import JobError

FORMAT = 3
PREFIX, UNFINISHED, DAMAGED, NAME = "step-", ".tmp", ".damaged", "about.json"


class CheckpointError(JobError):
    """A checkpoint cannot be written or read, or belongs to another training; the message says which and why."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes have changed since it was written; an older one may be intact."""


@dataclass(frozen=True)
class Identity:
    """What a training must have in common with one that it resumes; its plan and learning rates may differ.

    Attributes:
        rows: number of rows of the training set.
        tensors: shape of every tensor of the model.
        frozen: of a fine-tuning, what identifies the params that checkpoints leave out (`models.zoo.spec.ModelSpec`).
    """

    model: str
    optimizer: str
    seed: int
    batch_size: int
    rows: int
    tensors: Mapping[str, tuple[int, ...]]
    frozen: str = ""

    def check(self, other: Identity, where: Path) -> None:
        """Checks that the checkpoint at `where`, of `other`, can be resumed as this training.

        Raises:
            CheckpointError: it cannot; names the first tensor or setting that differs.
        """
        other.check_tensors(self.tensors, where)
        for key in ("optimizer", "seed", "batch_size", "rows"):
            if getattr(self, key) != getattr(other, key):
                raise CheckpointError(
                    f"{where} belongs to another training: {key} was {getattr(other, key)!r} and is "
                    f"{getattr(self, key)!r}; set it back, or name another folder"
                )
        if self.frozen != other.frozen:
            raise CheckpointError(
                f"{where} belongs to another fine-tuning: the params of model.init have changed since; put the former "
                "file back, or name another folder"
            )

    def check_tensors(self, expected: Mapping[str, tuple[int, ...]], where: Path) -> None:
        """Checks that this identity, of the checkpoint at `where`, has a model with the tensors `expected`.

        Raises:
            CheckpointError: names the first that differs.
        """
        for name in sorted({*self.tensors, *expected}):
            there, here = self.tensors.get(name), expected.get(name)
            if there != here:
                raise CheckpointError(
                    f"{where} belongs to another model: tensor {name!r} is {there or 'missing'} there and "
                    f"{here or 'missing'} here"
                )


def steps_in(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in `folder`, ascending.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoints in {folder} cannot be read: {error.strerror}") from error
    numbers = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"{PREFIX}{step:08}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest: `format`, `step`, `run`, `plan`, `memory` (kind of the rank-local state), `identity`, `files`.

    Raises:
        CheckpointError: not a checkpoint, or one of another version of this program.
    """
    path = checkpoint / NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
        if version != FORMAT:
            raise CheckpointError(f"{path} has format {version!r}, this program reads {FORMAT}")
        if manifest.pop("sha256") != digest(manifest):
            raise ValueError("it has changed since it was written")
        manifest["identity"]["tensors"] = {n: tuple(s) for n, s in manifest["identity"]["tensors"].items()}
        manifest["identity"] = Identity(**manifest["identity"])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is not the description of a checkpoint: {error}") from error
    return cast(dict[str, Any], manifest)


def verify_files(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Verifies the hashes of all files in `manifest`, as `read_manifest` returned it.

    Raises:
        DamagedCheckpoint: a file is missing or has changed; names it.
    """
    for name, expected in manifest["files"].items():
        try:
            actual = file_sha256(checkpoint / name)
        except OSError as error:
            raise DamagedCheckpoint(f"{checkpoint / name}: {error.strerror}") from error
        if actual != expected:
            raise DamagedCheckpoint(f"{checkpoint / name} has changed since it was written")


def digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own `sha256`."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
