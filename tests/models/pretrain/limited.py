"""Trainings by processes that may hold little memory: the kernel refuses them more. Runs in the ranks."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.pretrain import plan as plans
from models.pretrain import trainer, validation, world
from models.pretrain.data.batches import Arrays
from models.pretrain.params import save_parts
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.pretrain.recovery.export import export
from models.pretrain.recovery.manifest import path_of
from models.zoo import ModelSpec, gpt
from tests.models.pretrain.curves import VOCAB, settings

LIMITED = "tests.models.pretrain.limited:trained"
STEPS, SAVED_AT, SEED, LENGTH = 3, 1, 5, 4
_MMAP_THRESHOLD, _ARENAS, _KIB, _STACK_BYTES = -3, -8, 1024, 512 * 1024


@dataclass(frozen=True)
class Found:
    """What a training gave.

    Attributes:
        losses: of all steps.
        resumed: of those after the checkpoint, trained again from it.
        test_loss: of the model at the end.
        sha256: of its params file, and of the export of the checkpoint, on process 0.
    """

    losses: list[float]
    resumed: list[float]
    test_loss: float
    sha256: tuple[str, str] | None


def model(width: int, layers: int) -> ModelSpec:
    """A model whose activations are small beside its params."""
    return gpt.spec((LENGTH,), VOCAB, width=width, layers=layers, heads=4)


def rows() -> Arrays:
    ids = np.random.default_rng(3).integers(VOCAB, size=(20, LENGTH + 1)).astype(np.int32)
    return Arrays(ids[:, :-1], ids[:, 1:])


def trained(
    plan: str, width: int, layers: int, folder: Path, allowed_bytes: int = 0, **options: object
) -> Found:
    """Trains, saves, resumes, scores, writes and exports a model; with `allowed_bytes`, a process may take no more than that
    beyond what one has that trained a model as deep but narrow, and one as wide but shallow: its libraries and their
    buffers, threads, and the objects of Python for so many layers."""
    with world.join(plans.parse(plan)) as here:
        _train(here, model(32, layers), folder / "narrow", options)
        _train(here, model(width, max(1, here.plan.pp)), folder / "shallow", options)
        with _limit(allowed_bytes):
            return _train(here, model(width, layers), folder / "model", options)


def _train(here: world.World, spec: ModelSpec, folder: Path, options: dict[str, object]) -> Found:
    training = _begin(here, spec, options)
    checkpointer = Checkpointer(folder, Policy(), training.identity, here)
    losses = _steps(training, SAVED_AT)
    checkpointer.save(training.state, training.step)
    losses += _steps(training, STEPS)
    checkpointer.wait()
    del training
    gc.collect()
    training = _begin(here, spec, options)
    training.step = checkpointer.restore(training.state)
    resumed = _steps(training, STEPS)
    test_loss = validation.final_scores(training, spec, rows()).loss
    saved = save_parts(training.parallel.parts, spec, here, folder / "model.safetensors")
    sha256 = None
    if saved is not None:
        exported = export(path_of(folder, SAVED_AT), spec, folder / "exported.safetensors")
        sha256 = saved["model_sha256"], exported["model_sha256"]
    return Found(losses, resumed, test_loss, sha256)


def _begin(here: world.World, spec: ModelSpec, options: dict[str, object]) -> trainer.Trainer:
    return trainer.build(spec, rows(), settings(steps=STEPS, **options), here, SEED)


def _steps(training: trainer.Trainer, until: int) -> list[float]:
    losses: list[float] = []
    while training.step < until:
        training.train_step()
        losses += training.losses()
    return losses


@contextmanager
def _limit(allowed_bytes: int) -> Iterator[None]:
    """Lets this process take no more private memory than now and `allowed_bytes`: RLIMIT_DATA, which counts the heap and
    private writable mappings, and no pages of files."""
    gc.collect()
    libc = ctypes.CDLL(None)
    attributes = ctypes.create_string_buffer(64)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
    libc.pthread_setattr_default_np(attributes)  # 8 MiB a thread would hide what is measured
    libc.mallopt(_MMAP_THRESHOLD, 128 * _KIB)  # so that what is freed is given back
    libc.mallopt(_ARENAS, 1)
    libc.malloc_trim(0)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if allowed_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + allowed_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def private_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    found = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * _KIB
