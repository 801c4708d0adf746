"""The durable state of a simulation in its folder: the checkpoint, `rounds.csv` and `events.jsonl`.

After a round everything that a resumed run needs is durable; rounds that are much shorter than a commit share one, which is made while the next ones train. Params, strategy state and client states are files named
by the SHA-256 of their bytes; `checkpoint.json` names them together with the round. Replacing that small file atomically
is the commit: a crash leaves either the previous round or the new one. Randomness is derived from the seed and the round
and needs no saving.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from coordinator.errors import UserError
from coordinator.reports import run_files
from coordinator.reports.progress import Progress
from coordinator.rounds import engine
from coordinator.rounds.events import Clock, EventLog, Later
from coordinator.rounds.records import (
    NOBODY,
    Best,
    Checkpoint,
    Held,
    InFlight,
    RoundRecord,
    RunState,
    Training,
    as_row,
)
from coordinator.workers.pool import WorkerPool
from edge_client.files import write_durably
from edge_client.wire import arrays
from strategies.params import Params, State, Tensors, flatten, unflatten

FORMAT = 1

COMMIT_SHARE = 0.1
"""The share of a run's time that commits may take: rounds that are shorter than ten commits share one."""
MOST_SECONDS = 1.0
"""The most time between two commits, besides the round that is open."""


class SimulationStore:
    """Implements `engine.CommitStore`; use as a context manager, which opens and closes the line files.

    Attributes:
        checkpoint: the last committed round of an earlier process, or None.
    """

    def __init__(
        self, out: Path, progress: Progress, clock: Clock, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._progress = progress
        self._clock = clock
        self._monotonic = monotonic
        self._waiting: Checkpoint | None = None
        self._next_commit = -math.inf
        self._commit_seconds = 0.0
        self._later = Later()
        self._writer = ThreadPoolExecutor(1, "commit")
        self._writing: tuple[Checkpoint, Future[None]] | None = None
        self._checkpoints = CheckpointStore(out / "checkpoint")
        self.checkpoint = self._checkpoints.load()
        self.identity: Mapping[str, str] = {}

    def __enter__(self) -> SimulationStore:
        self._files = run_files.open_lines(self._out, self.checkpoint)
        self._events = EventLog(self._files["events.jsonl"], self._clock, self._later)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(OSError) if kind is not None else nullcontext():
                self._later.catch_up()
                try:
                    self._finish_writing()
                finally:
                    self._commit_waiting()
        finally:
            self._writer.shutdown()
            for file in self._files.values():
                file.close()

    @property
    def emit(self) -> EventLog:
        """Writes events."""
        return self._events

    def emit_resumed(self, checkpoint: Checkpoint, name: str) -> None:
        """Emits that the run resumes, and first the event of the checkpoint's round if the process died before it."""
        if self._files["events.jsonl"].size_bytes == checkpoint.offsets["events.jsonl"]:
            engine.emit_committed(self.emit, checkpoint.record)
        self.emit("run_resumed", experiment=name, round=checkpoint.round)

    def client_state(self, client: str) -> bytes | None:
        """What a client has kept by the last committed round, as `arrays.encode` of its flattened streams; None: nothing."""
        return self._checkpoints.read_client(client)

    def write_in_pauses(self, pool: WorkerPool) -> None:
        """From now on lines are written when the pool waits for its workers, not at once."""
        pool.pause = self._later.catch_up
        self._later.is_patient = True

    def materialize(self, state: RunState) -> RunState:
        return engine.materialize_in_memory(state)

    def commit(
        self, state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]
    ) -> None:
        """Makes the round durable. If that would take too much of the time, a later round's commit does, or the run's end, while further
        rounds go on.

        Raises:
            OSError: this commit has failed, or the one before it; what was committed before stays.
        """
        earlier = self._waiting.client_states if self._waiting is not None else {}
        offsets: dict[str, int] = {}
        self._later(lambda: offsets.update({name: file.size_bytes for name, file in self._files.items()}))
        self._waiting = Checkpoint(
            state.round,
            state.params,
            state.strategy,
            as_row(record),
            offsets,
            self.identity,
            {**earlier, **clients},
            state.best,
            state.in_flight,
            state.held,
        )
        is_short = record.seconds < self._commit_seconds / COMMIT_SHARE
        if self._writing is not None and (self._writing[1].done() or not is_short):
            self._finish_writing()
        if self._writing is not None or self._monotonic() < self._next_commit:
            return
        self._later.catch_up()
        if is_short:
            self._writing = self._waiting, self._writer.submit(self._write, self._waiting)
            self._waiting = None
        else:
            self._commit_waiting()

    def _commit_waiting(self) -> None:
        if self._waiting is not None:
            self._write(self._waiting)
            self._waiting = None

    def _finish_writing(self) -> None:
        """Waits for the commit that goes on beside the rounds. If it has failed, what it held still waits."""
        if self._writing is None:
            return
        checkpoint, written = self._writing
        wait([written])
        self._writing = None
        if written.exception() is not None:
            later = self._waiting or checkpoint
            self._waiting = replace(later, client_states={**checkpoint.client_states, **later.client_states})
        written.result()

    def _write(self, checkpoint: Checkpoint) -> None:
        began = self._monotonic()
        for file in self._files.values():
            file.sync()
        self._checkpoints.commit(checkpoint)
        ended = self._monotonic()
        self._commit_seconds = ended - began
        self._next_commit = ended + min(MOST_SECONDS, self._commit_seconds / COMMIT_SHARE)

    def on_committed(self, record: RoundRecord) -> None:
        self._later(lambda: run_files.append_round(self._files["rounds.csv"], record))
        self._progress.round(record)
        engine.emit_committed(self.emit, as_row(record))


class CheckpointStore:
    """The checkpoint of one run in `folder`, which one process uses at a time."""

    def __init__(self, folder: Path) -> None:
        self._pointer = folder / "checkpoint.json"
        self._blobs = folder / "blobs"
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._clients: dict[str, str] = {}
        self._best = (0, "")  # the best round, and the file of its params
        self._bases: dict[int, str] = {}  # of clients at work: the files of their params by round

    def commit(self, checkpoint: Checkpoint) -> None:
        """Replaces the stored checkpoint. `client_states` holds only the changed ones.

        Raises:
            OSError: the disk is full or not writable; the previous round stays committed.
        """
        params = self._write(checkpoint.params)
        state = self._write(checkpoint.state.arrays, checkpoint.state.values)
        clients = self._clients | {
            client: self._write(flatten(streams)) for client, streams in checkpoint.client_states.items()
        }
        best = checkpoint.best
        if best.params is not None and best.round != self._best[0]:
            self._best = (best.round, self._write(best.params))
        in_flight = checkpoint.in_flight
        bases = {
            number: self._bases.get(number) or self._write(base) for number, base in in_flight.bases.items()
        }
        document: dict[str, Any] = {
            "format": FORMAT,
            "round": checkpoint.round,
            "params": params,
            "state": state,
            "clients": clients,
            "record": dict(checkpoint.record),
            "offsets": dict(checkpoint.offsets),
            "identity": dict(checkpoint.identity),
            "best": {
                "round": best.round,
                "loss": best.loss,
                "waited": best.waited,
                "params": None if best.params is None else self._best[1],
            },
        }
        if in_flight != NOBODY:
            document["in_flight"] = {
                "seconds": in_flight.seconds,
                "started": in_flight.started,
                "clients": [asdict(each) for each in in_flight.clients],
                "bases": {str(number): digest for number, digest in bases.items()},
            }
        kept: set[str] = set()
        if (held := checkpoint.held) is not None:
            kept.add(digest := self._write(held.params))
            document["held"] = {**vars(held), "params": digest, "versions": dict(held.versions)}
        write_durably(self._pointer, json.dumps(document).encode())
        self._clients = clients
        self._bases = {**bases, checkpoint.round + 1: params}
        committed = {params, state, self._best[1], *clients.values(), *bases.values(), *kept}
        for path in self._blobs.iterdir():
            if path.name not in committed:
                path.unlink()

    def load(self) -> Checkpoint | None:
        """The stored checkpoint with all client states, or None if there is none.

        Raises:
            UserError: the checkpoint is damaged or of another version; names the file.
        """
        try:
            document = json.loads(self._pointer.read_bytes())
            if document["format"] != FORMAT:
                raise UserError(f"{self._pointer}: format {document['format']}, this version reads {FORMAT}")
            self._clients = dict(document["clients"])
            state = self._read(document["state"])
            return Checkpoint(
                round=document["round"],
                params=arrays.decode(self._read(document["params"])),
                state=State(arrays.decode(state), arrays.read_header(state).values),
                record=document["record"],
                offsets=document["offsets"],
                identity=document["identity"],
                client_states={
                    client: unflatten(arrays.decode(self._read(digest)))
                    for client, digest in self._clients.items()
                },
                best=self._read_best(document["best"]),
                in_flight=self._read_in_flight(document),
                held=self._read_held(document),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self._pointer}: the checkpoint is damaged: {error}; start the run anew"
            ) from None

    def read_client(self, client: str) -> bytes | None:
        """The stored state of a client; None if it has none."""
        digest = self._clients.get(client)
        return None if digest is None else self._read(digest)

    def _read_best(self, document: Mapping[str, Any]) -> Best:
        digest = document["params"]
        if digest is None:
            return Best(document["round"], document["loss"], document["waited"])
        self._best = (document["round"], digest)
        params = arrays.decode(self._read(digest))
        return Best(document["round"], document["loss"], document["waited"], params)

    def _read_in_flight(self, document: Mapping[str, Any]) -> InFlight:
        found = document.get("in_flight")
        if found is None:
            return NOBODY
        self._bases = {int(number): digest for number, digest in found["bases"].items()}
        return InFlight(
            found["seconds"],
            found["started"],
            tuple(Training(**each) for each in found["clients"]),
            {number: arrays.decode(self._read(digest)) for number, digest in self._bases.items()},
        )

    def _read_held(self, document: Mapping[str, Any]) -> Held | None:
        found = document.get("held")
        if found is None:
            return None
        params = arrays.decode(self._read(found["params"]))
        return Held(params, found["first"], tuple(found["sizes"]), found["versions"])

    def _write(self, tensors: Tensors, values: Mapping[str, Any] | None = None) -> str:
        """Stores arrays durably and returns their SHA-256."""
        payload = arrays.encode(tensors, values)
        digest = arrays.sha256(payload)
        write_durably(self._blobs / digest, payload)
        return digest

    def _read(self, digest: str) -> bytes:
        """The bytes of a file. Raises: ValueError: it was changed or is missing."""
        path = self._blobs / digest
        try:
            payload = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            raise ValueError(f"{path} is missing") from None
        if arrays.sha256(payload) != digest:
            raise ValueError(f"{path} does not hold what its name says")
        return payload
