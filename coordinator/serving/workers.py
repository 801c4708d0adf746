"""The front's side of worker processes: they are forked from one process that has imported their framework, and spoken to in frames.

See `models.serving.worker` for what they answer. A worker ends when its socket is closed; all of them end when the front does, whatever
ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.errors import Refusal
from coordinator.serving.resources.processes import memory_of, tree
from edge_client.processes.channel import Closed, Frame, encode_frame, read_frame
from edge_client.processes.fork_server import ForkServer
from edge_client.processes.process import Launch, worker_environment
from models import user_code

_WORKER = "models.serving.worker"
TORCH_MODULES = ("models.zoo", "models.compress.pruning.structure", "models.job")
LITERT_MODULES = ("ai_edge_litert.interpreter",)
OPEN_SECONDS = 300.0
_READ_BYTES = 2**20
_REPEATS = 3


@dataclass(frozen=True)
class Opening:
    """How the workers of a version open it. `model`, `backend`: as `models.serving.opening.open_model` takes them.

    `sizes`: of the batches to measure as it is opened. `generation`: fields of `models.serving.generation.engine.Options`; `schema`:
    the data schema as a document.
    """

    model: Mapping[str, Any]
    backend: str
    threads: int
    max_batch: int
    sizes: tuple[int, ...]
    generation: Mapping[str, Any] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None

    def frame(self, *, measures: bool) -> dict[str, Any]:
        """What a worker is asked. `measures`: what batches of all sizes take, not only of one row."""
        return {
            "kind": "open",
            "model": dict(self.model),
            "backend": self.backend,
            "threads": self.threads,
            "sizes": list(self.sizes) if measures else [1],
            "repeats": _REPEATS if measures else 1,
            "generation": dict(self.generation),
            "schema": self.schema,
        }


class WorkerDied(Exception):
    """A worker has ended before it answered; the message says how."""


class WorkerHost:
    """One process that has imported `modules` and forks workers. `log`: where they write what libraries print.

    `allowed_code`: models of a user's own code, `package.module:build`, that they may build.
    """

    def __init__(self, modules: Sequence[str], log: Path, allowed_code: Sequence[str] = ()) -> None:
        self._log = log
        launch = Launch(environment=lambda: _environment(allowed_code))
        self._server = ForkServer(_WORKER, tuple(modules), log, launch)
        self._lock = asyncio.Lock()

    async def fork(self) -> Worker:
        """A new worker.

        Raises:
            WorkerDied: none can be started.
        """
        async with self._lock:
            try:
                pid, channel = await asyncio.to_thread(self._server.fork)
            except OSError:
                tail = self._tail()
                raise WorkerDied(f"workers cannot be started; the end of {self._log}:\n{tail}") from None
        channel.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=channel, limit=_READ_BYTES)
        return Worker(pid, reader, writer, self._server.reap)

    async def open(self, frame: dict[str, Any]) -> tuple[Worker, dict[str, Any]]:
        """A new worker that has opened a model, and its answer. `frame`: as `models.serving.worker` takes `open`.

        Raises:
            WorkerDied: it ended. Refusal: 503 `cannot_open`: the model cannot be served; the message says why.
        """
        worker = await self.fork()
        try:
            answer = await asyncio.wait_for(worker.ask(frame), OPEN_SECONDS)
            if "error" in answer:
                raise Refusal(503, "cannot_open", answer["error"])
        except TimeoutError:
            worker.close()
            raise WorkerDied(f"the model was not open after {OPEN_SECONDS:g} s") from None
        except BaseException:
            worker.close()
            raise
        return worker, answer

    def pids(self) -> list[int]:
        """This process and all its workers, if it has been started."""
        return [] if self._server.pid is None else tree(self._server.pid)

    def close(self) -> None:
        """Ends and reaps the process and all its workers."""
        self._server.close()

    def _tail(self) -> str:
        with suppress(OSError):
            return "\n".join(self._log.read_text("utf-8", "replace").strip().splitlines()[-8:])
        return ""


class Worker:
    """A worker process. Answers to `infer` go to `on_answer`; when it ends, `on_end` is called once with how."""

    def __init__(
        self,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_reaped: Callable[[int], None],
    ) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer
        self._on_reaped = on_reaped
        self._reading: asyncio.Task[None] | None = None
        self._is_closed = False

    async def ask(self, values: dict[str, Any]) -> dict[str, Any]:
        """The answer to a frame, before `begin`.

        Raises:
            WorkerDied: it has ended instead.
        """
        self.send(values)
        try:
            return (await read_frame(self._reader)).values
        except Closed:
            self.close()
            raise WorkerDied(f"process {self.pid} ended while it did: {values['kind']}") from None

    def begin(self, on_answer: Callable[[Worker, Frame], None], on_end: Callable[[Worker], None]) -> None:
        """From now on answers are given to `on_answer`."""
        self._reading = asyncio.create_task(self._read(on_answer, on_end))

    def infer(self, number: int, rows: int, content: Sequence[bytes]) -> None:
        """Sends a batch. `content`: the bytes of its rows in order."""
        joined = content[0] if len(content) == 1 else b"".join(content)
        self.send({"kind": "infer", "id": number, "rows": rows}, (joined,))

    def kill(self) -> None:
        """Ends it at once; `on_end` follows."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends it; `on_end` is not called."""
        if not self._is_closed:
            self._is_closed = True
            if self._reading is not None:
                self._reading.cancel()
            self._writer.close()
            self.kill()
            self._on_reaped(self.pid)

    def memory_bytes(self) -> int:
        """Its own memory and its share of what it has in common with others (PSS); 0 if it has ended."""
        return memory_of(self.pid).pss

    def send(self, values: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a frame, unless it is closed."""
        if not self._writer.is_closing():
            self._writer.writelines(encode_frame(values, blobs).parts)

    async def _read(
        self, on_answer: Callable[[Worker, Frame], None], on_end: Callable[[Worker], None]
    ) -> None:
        with suppress(Closed):
            while True:
                on_answer(self, await read_frame(self._reader))
        self._reading = None
        self.close()
        on_end(self)


def _environment(allowed_code: Sequence[str]) -> dict[str, str]:
    """Threads of a worker that wait for each other sleep: on busy cores, spinning costs them a hundred times the computation.

    Workers build no model of a user's own code but these, whatever a version names within its options.
    """
    allowed = " ".join(allowed_code)
    return {"OMP_WAIT_POLICY": "PASSIVE", **worker_environment(), user_code.ALLOWED_VARIABLE: allowed}


def is_torch(model: Mapping[str, Any]) -> bool:
    """Whether PyTorch computes a model. `model`: as `models.serving.opening.open_model` takes it."""
    return not model.get("release") and not str(model["description"]["name"]).endswith(".keras")


def modules_for(model: Mapping[str, Any]) -> tuple[str, ...]:
    """What the workers of a model import before they are forked. TensorFlow starts threads, so each imports it by itself."""
    return LITERT_MODULES if model.get("release") else TORCH_MODULES
