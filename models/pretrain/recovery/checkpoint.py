"""Checkpoints of a training, from which it resumes under any plan: when to save, writing, and restoring.

Every process writes its shards, and reads back those its current plan gives it (`models.pretrain.recovery.state`). They
go to the files of a temporary folder, which is made durable and renamed while training continues: no copy of the state
is held. A damaged checkpoint (`models.pretrain.recovery.manifest`) is renamed to `step-….damaged`, and the training
resumes from the one before.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from edge_client.files import sync_folder, write_durably
from models.options import bounded
from models.pretrain.recovery import manifest, shards
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
        background: training continues while a checkpoint is made durable.
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
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

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
        load(state, path_of(self.folder, step))

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
        unfinished = path_of(self.folder, step).with_name(
            path_of(self.folder, step).name + manifest.UNFINISHED
        )
        if self.first:
            shutil.rmtree(unfinished, ignore_errors=True)
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, shards.parts_of(tensors), self.group)
        mine = shards.assign(parts)[dist.get_rank(self.group)]
        written = _write(unfinished, dist.get_rank(self.group), {name: tensors[name] for name in mine})
        writing = self._background.submit(self._complete, written, unfinished, description, self.best[0])
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
        except OSError as error:
            kept = steps_in(self.folder)
            newest = f"; that of step {kept[-1]} is whole" if kept else ""
            raise CheckpointError(
                f"the checkpoint of step {self.saved} could not be written to {self.folder}: "
                f"{error.strerror or error}{newest}"
            ) from error

    def _complete(
        self, written: BufferedRandom | OSError, unfinished: Path, description: Mapping[str, Any], best: int
    ) -> None:
        """Makes this process's file durable; once all have, the first publishes the checkpoint.

        Raises:
            OSError: on every process, if one of them could not write.
        """
        try:
            outcome: Any = ("", "") if isinstance(written, OSError) else _durable(written)
            failure = written if isinstance(written, OSError) else None
        except OSError as error:
            outcome, failure = ("", ""), error
        reports: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(reports, (outcome, failure), self.group)
        failures = [error for _, error in reports if error is not None]
        result: list[OSError | None] = [failures[0] if failures else None]
        if self.first and not failures:
            try:
                self._publish(
                    unfinished, {**description, "files": dict(sorted(each for each, _ in reports))}, best
                )
            except OSError as error:
                result[0] = error
        if self.first and result[0] is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.broadcast_object_list(result, src=0, group=self.group)
        if result[0] is not None:
            raise result[0]

    def _publish(self, unfinished: Path, description: Mapping[str, Any], best: int) -> None:
        """Adds the manifest, gives the folder its final name, and deletes expired checkpoints."""
        final = unfinished.with_suffix("")
        signed = {**description, "sha256": manifest.digest(json.loads(json.dumps(description)))}
        write_durably(unfinished / manifest.NAME, json.dumps(signed).encode())
        sync_folder(unfinished)
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        sync_folder(final.parent)
        for step in self.policy.expired(steps_in(final.parent), best):
            shutil.rmtree(path_of(final.parent, step), ignore_errors=True)

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
        own = load(state, path_of(self.folder, self.saved), with_rank_state=fits)
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


def load(state: State, checkpoint: Path, *, with_rank_state: bool = False) -> dict[str, torch.Tensor]:
    """Loads a checkpoint of any plan into `state`; returns this process's rank-local state in it if requested. Reads
    only what this process has.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    with _readable(checkpoint):
        stored = shards.stored_in(checkpoint)
        state.allocate_optimizer_state(stored)
        own = state.allocate_rank_state(stored) if with_rank_state else {}
        shards.read(stored, state.tensors_to_load() | own)
    return {name.removeprefix(f"{RANK}{state.rank}."): tensor for name, tensor in own.items()}


def read_tensors(checkpoint: Path, names: Sequence[str]) -> Iterator[torch.Tensor]:
    """Whole tensors of a checkpoint, in turn.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    with _readable(checkpoint):
        stored = shards.stored_in(checkpoint)
    for name in names:
        with _readable(checkpoint):
            tensor = shards.whole(stored, name)
        yield tensor


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error}") from error


def _write(unfinished: Path, rank: int, tensors: Mapping[str, torch.Tensor]) -> BufferedRandom | OSError:
    """This process's file in the folder of a checkpoint, or why it could not be written."""
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        return shards.write(unfinished / f"rank-{rank:05d}{shards.SUFFIX}", tensors)
    except OSError as error:
        return error


def _durable(file: BufferedRandom) -> tuple[str, str]:
    """Name and SHA-256 of a file that is on the disk."""
    return Path(file.name).name, shards.make_durable(file)
