"""Checkpoints of a training, from which it resumes under any plan: when to save, writing, and restoring.

Every process writes its shards, and reads back those its current plan gives it (`models.pretrain.recovery.state`). A
checkpoint is written to a temporary folder, made durable and renamed, while training continues on its own copy of the
state. A damaged checkpoint (`models.pretrain.recovery.manifest`) is renamed to `step-….damaged`, and the training
resumes from the one before.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import async_save

from edge_client.files import file_sha256, sync_folder, write_durably
from models.options import bounded
from models.pretrain.recovery import manifest
from models.pretrain.recovery.manifest import CheckpointError, DamagedCheckpoint, Identity, path_of, steps_in
from models.pretrain.recovery.state import RANK, State
from models.pretrain.world import World


@dataclass(frozen=True)
class Policy:
    """The `checkpoint` table of a job.

    Attributes:
        folder: of the checkpoints, relative to the job's `out`.
        every: steps between two checkpoints.
        keep: how many of the latest to keep.
        keep_every: checkpoints whose step this divides are kept as well; 0: none.
        keep_best: the one with the lowest validation loss is kept as well, and written as soon as it is found.
        result: which model the training ends with: the last, or that of this checkpoint.
        background: training continues while a checkpoint is written.
    """

    folder: str = "checkpoints"
    every: int = bounded(50, 1, 100_000_000)
    keep: int = bounded(2, 1, 1_000_000)
    keep_every: int = bounded(0, 0, 100_000_000)
    keep_best: bool = False
    result: Literal["last", "best"] = "last"
    background: bool = True

    def expired(self, steps: list[int], best: int = 0) -> list[int]:
        """Which of the checkpoints at `steps` to delete; never that of step `best`."""
        kept = {*sorted(steps)[-self.keep :], best}
        return [s for s in steps if s not in kept and not (self.keep_every and s % self.keep_every == 0)]


class Checkpointer:
    """Saves a training and restores it. Every process has one and calls the same methods in the same order.

    Args:
        folder: of all checkpoints of this training.
        run: name of the launch, the same after restarts of its processes.

    Attributes:
        notices: what was unexpected when the training was restored, on the first process.
        best: step and validation loss of the best checkpoint, with `keep_best`; step 0: none yet.
    """

    def __init__(self, folder: Path, policy: Policy, identity: Identity, world: World, run: str = "") -> None:
        self.folder, self.policy, self.identity, self.run = folder, policy, identity, run
        self.plan, self.first = str(world.plan), world.rank == 0
        # its own group, since it works in parallel with the training, and in host memory
        self.group = dist.new_group(backend="gloo")
        self.saved = -1
        self.notices: list[str] = []
        self.best: tuple[int, float] = (0, math.inf)
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._writing: Future[Metadata] | None = None

    def due(self, step: int) -> bool:
        return step % self.policy.every == 0 and step != self.saved

    def is_best(self, step: int, validation_loss: float) -> bool:
        """Whether to keep the checkpoint of `step` as the best so far; the earliest of equals stays."""
        if not self.policy.keep_best or not validation_loss < self.best[1]:
            return False
        self.best = (step, validation_loss)
        return True

    def restore_best(self, validated: Mapping[int, float]) -> None:
        """Continues with the best of the checkpoints there; `validated`: validation losses by step. A collective.

        Only the first process needs to know `validated`.
        """
        kept = [(loss, step) for step, loss in validated.items() if path_of(self.folder, step).exists()]
        message = [min(kept, default=(math.inf, 0))]
        dist.broadcast_object_list(message, src=0, group=self.group)
        self.best = message[0][::-1]

    def load_best(self, state: State) -> None:
        """Loads the best checkpoint into `state`, if there is one. A collective.

        Raises:
            CheckpointError: it is damaged.
        """
        step, _ = self.best
        if not step:
            return
        damage: list[Any] = [None]
        if self.first:
            try:
                path = path_of(self.folder, step)
                manifest.verify_files(path, manifest.read_manifest(path))
            except CheckpointError as error:
                damage[0] = f'the best model cannot be the result: {error}; set checkpoint.result = "last"'
        dist.broadcast_object_list(damage, src=0, group=self.group)
        if damage[0] is not None:
            raise CheckpointError(damage[0])
        load(state, path_of(self.folder, step), self.group)

    def save(self, state: State, step: int) -> None:
        """Starts to write a checkpoint once the previous one is complete; without `background`, writes it.

        Raises:
            CheckpointError: this one or the previous one could not be written; earlier ones are unchanged.
        """
        self.wait()
        tensors = state.tensors_to_save()
        description = {
            "format": manifest.FORMAT,
            "step": step,
            "run": self.run,
            "plan": self.plan,
            "memory": state.rank_state.kind if state.rank_state else "",
            "identity": asdict(self.identity),
        }
        writer = _Writer(self.folder, step, description, self.policy, self.best[0])
        writing = async_save(
            tensors, storage_writer=writer, async_stager=self._stager, process_group=self.group
        )
        assert isinstance(writing, Future)  # staging is not asynchronous
        self._writing, self.saved = writing, step
        if not self.policy.background:
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint being written is complete.

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
            newest = f"; that of step {kept[-1]} is whole" if kept else ""
            raise CheckpointError(
                f"the checkpoint of step {self.saved} could not be written to {self.folder}: "
                f"{_describe_cause(error)}{newest}"
            ) from error

    def restore(self, state: State, *, same_run: bool = False) -> int:
        """Loads the newest intact checkpoint into `state` and returns its step; 0, and nothing is done, without one.

        Damaged ones are set aside.

        Args:
            same_run: accept only checkpoints of this launch.

        Raises:
            CheckpointError: it is another training's, or all are damaged; or, with `same_run`, of another launch.
        """
        if self.first:
            for leftover in self.folder.glob(f"{manifest.PREFIX}*{manifest.UNFINISHED}"):
                shutil.rmtree(leftover, ignore_errors=True)
        # one process looks, so that all see the same
        rank_state = state.rank_state
        message: list[Any] = [None, rank_state.kind if rank_state else ""]
        if self.first:
            message[0] = self._newest(same_run)
        dist.broadcast_object_list(message, src=0, group=self.group)
        if isinstance(message[0], str):
            raise CheckpointError(message[0])
        if message[0] is None:
            return 0
        (self.saved, plan, kind), own_kind = message
        fits = bool(own_kind) and own_kind == kind
        own = load(state, path_of(self.folder, self.saved), self.group, with_rank_state=fits)
        if rank_state is not None:
            rank_state.restore(own, self.saved)
        if not fits and (kind or (own_kind and kind is None)):
            what = (
                f"the rank-local state of plan {plan} ({kind}) does not fit plan {self.plan}"
                if kind
                else f"it has no rank-local state for plan {self.plan}"
            )
            after = "losses will differ a little from those of an uninterrupted training"
            self.notices.append(f"checkpoint of step {self.saved}: {what}: {after}")
        return self.saved

    def _newest(self, same_run: bool) -> tuple[int, str, str | None] | str | None:
        """Step, plan and kind of rank-local state of the newest intact checkpoint; None without any; an error message
        if it cannot be resumed from, or all are damaged."""
        damaged: list[str] = []
        try:
            for step in reversed(steps_in(self.folder)):
                newest = path_of(self.folder, step)
                try:
                    description = manifest.read_manifest(newest)
                    self.identity.check(description["identity"], newest)
                    if same_run and description["run"] != self.run:
                        return (
                            f"{self.folder} holds checkpoints of an earlier training, up to step {description['step']}: "
                            "set resume = true to go on from there, or name another folder"
                        )
                    manifest.verify_files(newest, description)
                except DamagedCheckpoint as error:
                    damaged.append(str(error))
                    continue
                self._set_aside(step, damaged)
                return int(description["step"]), str(description["plan"]), description.get("memory")
        except CheckpointError as error:
            return str(error)
        if damaged:
            return "; ".join(damaged) + "; no whole checkpoint is left: begin anew in another folder"
        return None

    def _set_aside(self, step: int, damaged: Sequence[str]) -> None:
        """Renames the damaged checkpoints newer than `step`, so that no training uses them."""
        for each in steps_in(self.folder):
            if each > step:
                path = path_of(self.folder, each)
                aside = path.with_name(path.name + manifest.DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        self.notices += [f"{message}; going on from the checkpoint of step {step}" for message in damaged]


def load(
    state: State, checkpoint: Path, group: dist.ProcessGroup | None = None, *, with_rank_state: bool = False
) -> dict[str, torch.Tensor]:
    """Loads a checkpoint of any plan into `state`; returns this process's rank-local state in it if requested.

    All processes of `group` call it.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    reader = FileSystemReader(checkpoint)
    try:
        entries = reader.read_metadata().state_dict_metadata
        stored = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        state.allocate_optimizer_state(stored)
        own = state.allocate_rank_state(stored) if with_rank_state else {}
        tensors: dict[str, Any] = state.tensors_to_load() | own
        missing = sorted(tensors.keys() - stored.keys())
        if missing:
            raise CheckpointError(f"{checkpoint} has no tensor {missing[0]!r}")
        load_shards(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
        return {name.removeprefix(f"{RANK}{state.rank}."): tensor for name, tensor in own.items()}
    except CheckpointError:
        raise
    except Exception as error:  # torch raises many kinds of errors on damaged files
        raise CheckpointError(f"{checkpoint} cannot be read: {_describe_cause(error)}") from error


class _Writer(FileSystemWriter):
    """Writes to a temporary folder; once all processes have written, the first renames it and deletes expired ones."""

    def __init__(
        self, folder: Path, step: int, description: Mapping[str, Any], policy: Policy, best: int
    ) -> None:
        self.final = path_of(folder, step)
        super().__init__(self.final.with_name(self.final.name + manifest.UNFINISHED), sync_files=True)
        self.description, self.policy, self.best = description, policy, best

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        unfinished = Path(self.path)
        files = sorted(path for path in unfinished.iterdir() if path.is_file())
        description = {**self.description, "files": {path.name: file_sha256(path) for path in files}}
        signed = {**description, "sha256": manifest.digest(json.loads(json.dumps(description)))}
        write_durably(unfinished / manifest.NAME, json.dumps(signed).encode())
        sync_folder(unfinished)
        if self.final.exists():
            shutil.rmtree(self.final)
        unfinished.rename(self.final)
        sync_folder(self.final.parent)
        for step in self.policy.expired(steps_in(self.final.parent), self.best):
            shutil.rmtree(path_of(self.final.parent, step), ignore_errors=True)


def _describe_cause(error: BaseException) -> str:
    """The first process's reason, in a few words."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    # how torch's writer reports a full disk
    if "PytorchStreamWriter" in str(error) or "unexpected pos" in str(error):
        return f"{os.strerror(errno.ENOSPC)}, or nearly ({str(error).splitlines()[0]})"
    if type(error).__name__ == "UnpicklingError" or "weights_only" in str(error):
        return "a file is damaged"  # torch would advise to read it without its checks
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
