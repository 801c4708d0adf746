"""Checkpoints of a training: what every process has of it, in one folder, to go on from under any plan.

    checkpoints/step-00000050/   torch.distributed.checkpoint's files, and about.json
    checkpoints/step-00000100.tmp/   being written; what a killed process leaves is removed at the next start

Tensors bear the names they have in the whole model: params and buffers their own, optimizer state
`optim.<param>.<key>`. Every process writes its shards, one of those that have the same writes it, and reads back
what the plan it runs then gives it, whoever wrote that. Data order and dropout are functions of seed and step (see
`batches` and `trainer`), so the step is all there is to know of them.

A checkpoint is complete when its folder has its name: it is written aside, made durable and renamed. Training goes on
meanwhile, on its own copy of the state.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import async_save

from edge_client.files import sync_folder, write_durably
from models.job import JobError
from models.options import bounded
from models.pretrain.parallelize import whole_name
from models.pretrain.params import named_tensors, shapes_of
from models.pretrain.world import World

FORMAT = 1
OPTIMIZER = "optim."
_PREFIX, _UNFINISHED, _ABOUT = "step-", ".tmp", "about.json"


class CheckpointError(JobError):
    """A checkpoint cannot be written or read, or belongs to another training; the message says which and why."""


@dataclass(frozen=True)
class Policy:
    """The `checkpoint` table of a job.

    Attributes:
        folder: where they are, counted from the job's `out`.
        every: steps between two.
        keep: how many of the latest stay.
        keep_every: those whose step this divides stay besides; 0: none.
        background: training goes on while one is written.
    """

    folder: str = "checkpoints"
    every: int = bounded(50, 1, 100_000_000)
    keep: int = bounded(2, 1, 1_000_000)
    keep_every: int = bounded(0, 0, 100_000_000)
    background: bool = True

    def drops(self, steps: list[int]) -> list[int]:
        """Which of the checkpoints at `steps` may go."""
        latest = sorted(steps)[-self.keep :]
        return [s for s in steps if s not in latest and not (self.keep_every and s % self.keep_every == 0)]


@dataclass(frozen=True)
class Identity:
    """What a training must have in common with one that it continues; its plan and its rates need not be the same.

    Attributes:
        rows: of the training set.
        tensors: shape of every tensor of the model.
    """

    model: str
    optimizer: str
    seed: int
    batch_size: int
    rows: int
    tensors: Mapping[str, tuple[int, ...]]

    def check(self, other: Identity, where: Path) -> None:
        """Makes sure that what is at `where`, `other`, may go on as this.

        Raises:
            CheckpointError: it may not; names the first tensor or setting that differs.
        """
        other.check_tensors(self.tensors, where)
        for key in ("optimizer", "seed", "batch_size", "rows"):
            if getattr(self, key) != getattr(other, key):
                raise CheckpointError(
                    f"{where} belongs to another training: {key} was {getattr(other, key)!r} and is "
                    f"{getattr(self, key)!r}; set it back, or name another folder"
                )

    def check_tensors(self, expected: Mapping[str, tuple[int, ...]], where: Path) -> None:
        """Makes sure that this, found at `where`, is of a model with the tensors `expected`.

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


def identity_of(
    module: nn.Module, model: str, optimizer: str, seed: int, batch_size: int, rows: int
) -> Identity:
    """Of a training of `module`, a whole model."""
    return Identity(model, optimizer, seed, batch_size, rows, shapes_of(module))


def steps_in(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in `folder`, ascending.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoints in {folder} cannot be read: {error.strerror}") from error
    numbers = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def path_of(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08}"


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, if it has one."""
    steps = steps_in(folder)
    return path_of(folder, steps[-1]) if steps else None


def about(checkpoint: Path) -> dict[str, Any]:
    """What its about.json says: `format`, `step`, `run`, `plan`, `identity`.

    Raises:
        CheckpointError: no checkpoint, or one of a later edition of this program.
    """
    path = checkpoint / _ABOUT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        form = found["format"]
        found["identity"]["tensors"] = {n: tuple(s) for n, s in found["identity"]["tensors"].items()}
        found["identity"] = Identity(**found["identity"])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not the description of a checkpoint: {error}") from error
    if form != FORMAT:
        raise CheckpointError(f"{path} has format {form!r}, this program reads {FORMAT}")
    return cast(dict[str, Any], found)


@dataclass(frozen=True)
class State:
    """The tensors a process keeps, by name: live ones, which loading fills.

    Attributes:
        buffers: whether it writes those. Processes that compute different rows have different ones (running
            means); those of the first count, as when the whole model is gathered.
    """

    parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    buffers: bool = True

    def tensors(self) -> dict[str, torch.Tensor]:
        """All but optimizer state."""
        return {
            name: tensor.detach()
            for name, tensor in self._named().items()
            if self.buffers or isinstance(tensor, nn.Parameter)
        }

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """State there is; none before the first step, and only for the params an optimizer owns."""
        return {
            f"{OPTIMIZER}{name}.{key}": value.detach()
            for name, state, _, _ in self._owned()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def prepare(self, stored: Mapping[str, TensorStorageMetadata]) -> None:
        """Makes room for the optimizer state there is in a checkpoint, and drops any other."""
        keys: dict[str, list[str]] = {}
        for stored_name in stored:
            if stored_name.startswith(OPTIMIZER):
                name, _, key = stored_name.removeprefix(OPTIMIZER).rpartition(".")
                keys.setdefault(name, []).append(key)
        for name, state, parameter, group in self._owned():
            state.clear()
            for key in keys.get(name, []):
                found = stored[f"{OPTIMIZER}{name}.{key}"]
                if found.size == parameter.shape:
                    state[key] = torch.zeros_like(parameter, dtype=found.properties.dtype).detach()
                else:  # a step count, which fused optimizers want where the params are
                    device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                    state[key] = torch.zeros(found.size, dtype=found.properties.dtype, device=device)

    def _named(self) -> dict[str, torch.Tensor]:
        return {
            whole_name(name): tensor for part in self.parts for name, tensor in named_tensors(part).items()
        }

    def _owned(self) -> Iterator[tuple[str, dict[str, Any], torch.Tensor, dict[str, Any]]]:
        names = {id(tensor): name for name, tensor in self._named().items()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield names[id(parameter)], optimizer.state[parameter], parameter, group


class Checkpointer:
    """Saves a training and restores it. Every process has one and calls the same methods in the same order.

    Args:
        folder: of all checkpoints of this training.
        run: names the launch, restarts of its processes included.
    """

    def __init__(self, folder: Path, policy: Policy, identity: Identity, world: World, run: str = "") -> None:
        self.folder, self.policy, self.identity, self.run = folder, policy, identity, run
        self.plan, self.first = str(world.plan), world.rank == 0
        # of its own, since it works beside the training, and in host memory
        self.group = dist.new_group(backend="gloo")
        self.saved = -1
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._writing: Future[Metadata] | None = None

    def due(self, step: int) -> bool:
        return step % self.policy.every == 0 and step != self.saved

    def save(self, state: State, step: int) -> None:
        """Begins to write a checkpoint, having waited for the one before; without `background`, writes it.

        Raises:
            CheckpointError: this one or the one before could not be written; earlier ones are as they were.
        """
        self.wait()
        tensors = state.tensors() | state.optimizer_tensors()
        description = {
            "format": FORMAT,
            "step": step,
            "run": self.run,
            "plan": self.plan,
            "identity": asdict(self.identity),
        }
        writer = _Writer(self.folder, step, description, self.policy)
        writing = async_save(
            tensors, storage_writer=writer, async_stager=self._stager, process_group=self.group
        )
        assert isinstance(writing, Future)  # staging was not asked to be asynchronous
        self._writing, self.saved = writing, step
        if not self.policy.background:
            self.wait()

    def wait(self) -> None:
        """Until what is being written is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except (CheckpointException, OSError) as error:
            kept = steps_in(self.folder)
            standing = f"; that of step {kept[-1]} is whole" if kept else ""
            raise CheckpointError(
                f"the checkpoint of step {self.saved} could not be written to {self.folder}: "
                f"{_cause(error)}{standing}"
            ) from error

    def restore(self, state: State, *, anew: bool = False) -> int:
        """Fills `state` from the newest checkpoint and gives its step; 0 and nothing done where there is none.

        Args:
            anew: only checkpoints of this very launch count.

        Raises:
            CheckpointError: it is another training's, or damaged; or there is one of another launch and `anew`.
        """
        if self.first:
            for left in self.folder.glob(f"{_PREFIX}*{_UNFINISHED}"):
                shutil.rmtree(left, ignore_errors=True)
        # one process looks, so that all see the same
        found: list[Any] = [None]
        if self.first:
            found = [self._newest(anew)]
        dist.broadcast_object_list(found, src=0, group=self.group)
        if isinstance(found[0], str):
            raise CheckpointError(found[0])
        if found[0] is None:
            return 0
        self.saved = int(found[0])
        load(state, path_of(self.folder, self.saved), self.group)
        return self.saved

    def _newest(self, anew: bool) -> int | str | None:
        """Its step, none, or what is wrong with it."""
        try:
            newest = latest(self.folder)
            if newest is None:
                return None
            description = about(newest)
            self.identity.check(description["identity"], newest)
            if anew and description["run"] != self.run:
                return (
                    f"{self.folder} holds checkpoints of an earlier training, up to step {description['step']}: "
                    "set resume = true to go on from there, or name another folder"
                )
            return int(description["step"])
        except CheckpointError as error:
            return str(error)


def load(state: State, checkpoint: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fills `state` from a checkpoint, whatever plan wrote it. All processes of `group` call it.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    reader = FileSystemReader(checkpoint)
    try:
        stored = _tensors_in(reader)
        state.prepare(stored)
        whole = State(state.parts, state.optimizers)
        tensors: dict[str, Any] = whole.tensors() | whole.optimizer_tensors()
        missing = sorted(tensors.keys() - stored.keys())
        if missing:
            raise CheckpointError(f"{checkpoint} has no tensor {missing[0]!r}")
        load_shards(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointError:
        raise
    except (CheckpointException, OSError, EOFError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {_cause(error)}") from error


def _tensors_in(reader: FileSystemReader) -> dict[str, TensorStorageMetadata]:
    entries = reader.read_metadata().state_dict_metadata
    return {name: found for name, found in entries.items() if isinstance(found, TensorStorageMetadata)}


class _Writer(FileSystemWriter):
    """Writes a checkpoint aside; once all processes have written, the first gives it its name and drops old ones."""

    def __init__(self, folder: Path, step: int, description: Mapping[str, Any], policy: Policy) -> None:
        self.final = path_of(folder, step)
        super().__init__(self.final.with_name(self.final.name + _UNFINISHED), sync_files=True)
        self.description, self.policy = description, policy

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        unfinished = Path(self.path)
        write_durably(unfinished / _ABOUT, json.dumps(self.description).encode())
        sync_folder(unfinished)
        if self.final.exists():
            shutil.rmtree(self.final)
        unfinished.rename(self.final)
        sync_folder(self.final.parent)
        for step in self.policy.drops(steps_in(self.final.parent)):
            shutil.rmtree(path_of(self.final.parent, step), ignore_errors=True)


def _cause(error: BaseException) -> str:
    """The first process's reason, in a few words."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    # what torch's writer makes of a full disk
    if "PytorchStreamWriter" in str(error) or "unexpected pos" in str(error):
        return f"{os.strerror(errno.ENOSPC)}, or nearly ({str(error).splitlines()[0]})"
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
