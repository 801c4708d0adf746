"""What micro-batching brings: many programs ask the model of one device, a row a request, one by one or run together.

    python -m tests.bench --only predict

Two services of the same release answer the same clients in turns, one with batches of one, the other of up to 16. Beside them, what
a row costs in the interpreter itself, alone and as one of 16.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.infer.runtime import load
from edge_client.serving.listening import listening
from edge_client.serving.service import Batching, Service
from models import zoo
from models.compress.quantization.quantize import to_tflite
from models.release.inference import (
    ReleaseOptions,
    Source,
    release,
)
from tests.bench.interleaved import medians

CLIENTS, REQUESTS, REPEATS, BATCH = 16, 40, 5, 16
MODELS: dict[str, dict[str, Any]] = {
    "cnn": {"hidden": 32},
    "resnet8": {"norm": "batch", "width": 16},
}


def run() -> dict[str, Any]:
    """Prints and returns rows a second of both services, and microseconds a row of the interpreter."""
    results: dict[str, Any] = {}
    for name, options in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            made = _released(name, options, Path(folder))
            found = {**_interpreter(made), **asyncio.run(_services(made, Path(folder)))}
        results[name] = found
        sys.stdout.write(
            f"{name:8} interpreter {found['row_us']:.0f} us a row, of {BATCH} {found['row_of_batch_us']:.0f} us; "
            f"service {found['alone_rows_per_s']:.0f} rows/s one by one, {found['batched_rows_per_s']:.0f} in batches "
            f"({found['gain']:.2f} times)\n"
        )
    return results


def _released(name: str, options: dict[str, Any], folder: Path) -> Path:
    rng = np.random.default_rng(0)
    spec = zoo.get(name, input_shape=(28, 28), classes=10, **options)
    module = spec.build(0).eval()
    x, y = rng.random((64, 28, 28), np.float32), rng.integers(0, 10, 64).astype(np.int32)
    source = Source(spec, to_tflite(module, spec), "float32", module)
    report = release(source, x, y, ReleaseOptions(name=name, real_rows=0), folder / "release")
    assert report["takes_batches"], f"{name} takes one row at a time"
    return folder / "release"


def _interpreter(made: Path) -> dict[str, float]:
    alone, together = load(made), load(made)
    x = np.random.default_rng(1).random((BATCH, 28, 28), np.float32)
    found = medians({"row": lambda: alone.predict(x[:1]), "batch": lambda: together.predict(x)}, 200)
    return {"row_us": 1e6 * found["row"], "row_of_batch_us": 1e6 * found["batch"] / BATCH}


async def _services(made: Path, folder: Path) -> dict[str, float]:
    services = {most: Service(lambda: made, Batching(most, 0.002)) for most in (1, BATCH)}
    paths = {most: folder / f"{most}.sock" for most in services}
    with ExitStack() as sockets:
        serving = [
            asyncio.create_task(service.serve(sockets.enter_context(listening(paths[most]))))
            for most, service in services.items()
        ]
        seconds = await _turns(paths)
        for service in services.values():
            service.end()
        await asyncio.gather(*serving)
    rates = {most: CLIENTS * REQUESTS / float(np.median(each)) for most, each in seconds.items()}
    counts = services[BATCH].counts
    return {
        "alone_rows_per_s": rates[1],
        "batched_rows_per_s": rates[BATCH],
        "gain": rates[BATCH] / rates[1],
        "rows_per_batch": counts.rows / counts.batches,
    }


async def _turns(paths: dict[int, Path]) -> dict[int, list[float]]:
    """Of each service, the seconds of every turn but the first."""
    seconds: dict[int, list[float]] = {most: [] for most in paths}
    for turn in range(REPEATS + 1):
        for most, path in paths.items():
            began = time.perf_counter()
            await asyncio.gather(*(_client(path) for _ in range(CLIENTS)))
            if turn:
                seconds[most].append(time.perf_counter() - began)
    return seconds


async def _client(path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(str(path))
    row = np.random.default_rng(2).random((1, 28 * 28)).round(3).tolist()
    line = json.dumps({"id": 0, "x": row}).encode() + b"\n"
    for _ in range(REQUESTS):
        writer.write(line)
        answer = json.loads(await reader.readline())
        assert "labels" in answer, answer
    writer.close()
