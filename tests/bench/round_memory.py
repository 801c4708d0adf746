"""Peak memory of one round over stored updates, from the check of each upload to the committed blobs.

The engine is the real one; updates lie in files, as the device API leaves them. Each case is a process of its
own, whose peak (VmHWM) is reset before the round and compared with what was resident then.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.rounds import engine, intake
from coordinator.rounds.closing import Closing
from coordinator.rounds.engine import materialize_in
from coordinator.rounds.fleet import (
    Answer,
    Model,
    OpenRound,
    Terms,
)
from coordinator.rounds.plan import LocalWork, RunPlan, Task
from coordinator.rounds.records import RoundRecord, RunState, Score
from coordinator.storage.blobs import Blobs
from edge_client.wire import arrays
from edge_client.wire.arrays import FilePayload
from strategies import presets
from strategies.params import Params, State, Tensors, flatten

CLIENTS = 8
MODEL_BYTES = 100_000_000
COMMAND = (sys.executable, "-m", "tests.bench.round_memory")
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "fedavg, 25 tensors": ("fedavg", {}, 25),
    "fedavg, 1 tensor": ("fedavg", {}, 1),
    "fedavg clipped, 25 tensors": ("fedavg", {"clip_norm": 1.0}, 25),
    "fedadam, 25 tensors": ("fedadam", {}, 25),
    "fedadam, 1 tensor": ("fedadam", {}, 1),
    "scaffold, 25 tensors": ("scaffold", {}, 25),
}


def run() -> dict[str, float]:
    """Peak above idle as a multiple of the model, and seconds, by case."""
    figures: dict[str, float] = {}
    for case in CASES:
        found = measured(case, MODEL_BYTES)
        ratio = found["peak"] / MODEL_BYTES
        print(
            f"{case}: peak {found['peak'] / 1e6:.1f} MB above idle, {ratio:.2f} x the model; "
            f"{found['seconds']:.2f} s from check to commit"
        )
        figures |= {f"{case}: peak / model": ratio, f"{case}: s": found["seconds"]}
    return figures


class StoredFleet:
    """A fleet whose clients have uploaded already: files, checked as they are asked for."""

    def __init__(self, blobs: Blobs, uploads: Mapping[str, Path]) -> None:
        self._blobs = blobs
        self._uploads = uploads
        self._requested: tuple[Sequence[Task], Terms] | None = None

    def find_open_round(self, round_number: int) -> OpenRound | None:
        return None

    def clients(self, wanted: int) -> Sequence[str]:
        return list(self._uploads)

    def declared_examples(self, clients: Sequence[str]) -> Mapping[str, int]:
        return dict.fromkeys(clients, 10)

    def model(self, params: Tensors, streams: Mapping[str, Tensors]) -> Model:
        stored = self._blobs.put_arrays(params)
        extra = self._blobs.put_arrays(flatten(streams)).size_bytes if streams else 0
        return Model(params, streams, stored.sha256, stored.size_bytes + extra)

    def submit(self, tasks: Sequence[Task], model: Model, terms: Terms) -> None:
        self._requested = tasks, terms

    def results(self, excluded: Collection[int] = ()) -> Iterator[Answer]:
        assert self._requested is not None
        tasks, terms = self._requested
        for task in tasks:
            payload = FilePayload(self._uploads[task.message.client])
            yield Answer(task, intake.check(payload, task, terms.expected), payload.size_bytes, 1.0)

    def simulated_seconds(self) -> None:
        return None

    def cancel(self, tasks: Sequence[Task]) -> None:
        assert not tasks

    def client_state(self, accepted: Sequence[str]) -> Mapping[str, Mapping[str, Params]]:
        return {}

    def restore(self, states: Mapping[str, Mapping[str, Params]]) -> None:
        assert not states


def measured(case: str, model_bytes: int) -> dict[str, float]:
    """Peak above idle in bytes, and seconds, of one case in a process of its own."""
    done = subprocess.run([*COMMAND, case, str(model_bytes)], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _here(case: str, model_bytes: int) -> dict[str, float]:
    """The same, of this process."""
    name, options, count = CASES[case]
    plan = RunPlan(
        7, 1, presets.get(name, **options), LocalWork(4, 0.1, 1, None), tuple(_names(count)), Closing(CLIENTS)
    )
    with tempfile.TemporaryDirectory() as folder:
        blobs = Blobs(Path(folder) / "blobs")
        # A process of its own, so that nothing of the making is left in this one.
        made = subprocess.run([*COMMAND, case, str(model_bytes), folder], check=True, capture_output=True)
        base, state = json.loads(made.stdout)
        start = RunState(0, blobs.open_arrays(base), State(blobs.open_arrays(state), _values(blobs, state)))
        fleet = StoredFleet(blobs, {str(i): Path(folder) / f"upload-{i}" for i in range(CLIENTS)})
        Path("/proc/self/clear_refs").write_text("5")
        idle, began = _status("VmRSS"), time.perf_counter()
        last = engine.run(
            plan, fleet, start, _Store(blobs), evaluate=lambda number, params: Score(None, None, {}),
            emit=lambda event, **values: None, monotonic=time.monotonic,
        )  # fmt: skip
        assert last.round == 1
        assert arrays.read_header(FilePayload(last.params.payload.path)) is not None  # type: ignore[attr-defined]
        return {"peak": _status("VmHWM") - idle, "seconds": time.perf_counter() - began}


class _Store:
    """A commit store of blobs."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def materialize(self, state: RunState) -> RunState:
        return materialize_in(self._blobs, state)

    def commit(
        self, state: RunState, record: RoundRecord, clients: Mapping[str, Mapping[str, Params]]
    ) -> None:
        assert record.accepted == CLIENTS, record
        self._blobs.put_arrays(state.params)
        self._blobs.put_arrays(state.strategy.arrays, state.strategy.values)

    def on_committed(self, record: RoundRecord) -> None: ...


def _make(case: str, model_bytes: int, folder: Path) -> tuple[str, str]:
    """Params, state and uploads of a case as files; the digests of params and state."""
    name, options, count = CASES[case]
    rng = np.random.default_rng(0)
    values = model_bytes // 4 // count

    def tensors() -> Params:
        return {name: rng.standard_normal(values, np.float32) for name in _names(count)}

    blobs, strategy = Blobs(folder / "blobs"), presets.get(name, **options)
    params = tensors()
    state = strategy.init(params, list(params))
    base = blobs.put_arrays(params).sha256
    streams = {stream: tensors() for stream in strategy.broadcast(state)}
    for i in range(CLIENTS):
        header = {
            "round": 1,
            "client": str(i),
            "base": base,
            "num_examples": 10 + i,
            "num_steps": -(-(10 + i) // 4),
            "train_loss": 0.5,
        }
        arrays.write(folder / f"upload-{i}", flatten({"delta": tensors(), **streams}), header)
    return base, blobs.put_arrays(state.arrays, state.values).sha256


def _values(blobs: Blobs, digest: str) -> dict[str, Any]:
    return blobs.open_arrays(digest).header.values


def _names(count: int) -> list[str]:
    return [f"layer{i:02}.weight" for i in range(count)]


def _status(key: str) -> int:
    """A figure of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    case, size, *folder = sys.argv[1:]
    print(json.dumps(_make(case, int(size), Path(folder[0])) if folder else _here(case, int(size))))
