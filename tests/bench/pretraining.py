"""What a pretraining costs besides its arithmetic: overhead against a plain loop, and the time to its first step.

Overhead: `training_process.pretrain`, as the command runs it, with reports, curve, clipping and hang detection, and with
checkpoints in a second training; and the loop one would write by hand. Both train the same transformer on one thread of the
same process, in turns of a few steps; a turn's ratio is against the loop's turn beside it. A busy machine disturbs processor seconds least, so these are what is promised.

Start: from the command to the end of the first step, beside `import torch`, in turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from models import zoo
from models.pretrain import training_process
from models.pretrain.training import TrainingOptions
from tests.bench.start_up import watching

OVERHEAD, START_SECONDS = 0.02, 4.0
"""What is promised: of a step of 30 ms, and on a machine that imports torch in a second."""

LENGTH, VOCAB, LAYERS, HEADS = 64, 96, 2, 4
_FEDLOOP = str(Path(sys.executable).with_name("fedloop"))


@dataclass(frozen=True)
class Sizes:
    """`width` makes a step take about 30 ms; `turn`: steps between two measurements."""

    width: int = 64
    batch_size: int = 32
    steps: int = 640
    turn: int = 20
    starts: int = 5


def run() -> dict[str, Any]:
    """Both figures, and in `failures` what was promised and does not hold."""
    return measure(Sizes())


def measure(sizes: Sizes) -> dict[str, Any]:
    torch.set_num_threads(1)
    plain = {name: overhead(sizes, every) for name, every in (("without", 0), ("with", 50))}
    begun = start(sizes.starts)
    failures = []
    if plain["without"]["overhead"] > OVERHEAD:
        failures.append(f"overhead of {plain['without']['overhead']:.1%}, promised {OVERHEAD:.0%}")
    if begun["seconds"] > START_SECONDS * max(1.0, begun["import_torch_seconds"]):
        failures.append(f"start in {begun['seconds']:.1f} s, promised {START_SECONDS:g}")
    for name, found in plain.items():
        print(
            f"pretraining {name} checkpoints, {1e3 * found['plain_cpu_seconds']:.1f} ms a step of a plain loop: "
            f"{found['overhead']:+.1%} processor seconds ({found['least']:+.1%} to {found['most']:+.1%} in half of the "
            f"turns), {found['wall_overhead']:+.1%} by the clock"
        )
    print(
        f"start of fedloop pretrain, digits: first step after {begun['seconds']:.2f} s, {begun['cpu_seconds']:.2f} s of "
        f"processors in all; import torch {begun['import_torch_seconds']:.2f} s"
    )
    return {"overhead": plain, "start": begun, "failures": failures}


@dataclass
class Turns:
    """Lets a plain loop take a turn before each turn of the trainer. Seconds: (clock, processor) of every turn."""

    loop: Callable[[], None]
    steps: int
    plain: list[tuple[float, float]] = field(default_factory=list)
    ours: list[tuple[float, float]] = field(default_factory=list)
    _began: tuple[float, float] | None = None

    def around(self, step: int) -> AbstractContextManager[None]:
        if step % self.steps == 0:
            now = _now()
            if self._began is not None:
                self.ours.append(_since(self._began, now))
            self.loop()
            self._began = _now()
            self.plain.append(_since(now, self._began))
        return nullcontext()


def overhead(sizes: Sizes, checkpoint_every: int) -> dict[str, float]:
    """Medians over turns of what the trainer takes more, as a share."""
    with tempfile.TemporaryDirectory() as name:
        job = _write_job(Path(name), sizes, checkpoint_every)
        batches = _batches(sizes)
        step = _plain_step(sizes)

        def loop() -> None:
            for _ in range(sizes.turn):
                step(next(batches))

        turns = Turns(loop, sizes.turn)
        with (Path(name) / "reports").open("w") as sink:

            def report(**fields: object) -> None:
                sink.write(json.dumps(fields) + "\n")
                sink.flush()

            training_process.pretrain(job, report, turns.around)
    pairs = list(zip(turns.ours, turns.plain, strict=False))[1:]  # the first turn warms up
    wall, cpu = ([mine[at] / plain[at] - 1 for mine, plain in pairs] for at in (0, 1))
    quarters = statistics.quantiles(cpu, n=4)
    return {
        "overhead": statistics.median(cpu),
        "least": quarters[0],
        "most": quarters[2],
        "wall_overhead": statistics.median(wall),
        "plain_cpu_seconds": statistics.median(plain[1] for _, plain in pairs) / sizes.turn,
        "plain_seconds": statistics.median(plain[0] for _, plain in pairs) / sizes.turn,
    }


def start(starts: int) -> dict[str, float]:
    """Medians; processor seconds are those of the whole command, which trains one epoch, and of all its processes."""
    firsts, cpus, imports = [], [], []
    with tempfile.TemporaryDirectory() as name:
        for turn in range(starts + 1):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            imported = time.perf_counter() - began
            out = Path(name) / str(turn)
            began_at = time.time()
            with watching() as watched:
                subprocess.run(
                    [_FEDLOOP, "pretrain", "--set", "train.epochs=1", "--out", str(out)],
                    check=True,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                )
            if turn:  # the first fills the caches of bytecode
                firsts.append(_first_step(out / "events.jsonl") - began_at)
                cpus.append(watched.table()["cpu_seconds"])
                imports.append(imported)
    return {
        "seconds": statistics.median(firsts),
        "least_seconds": min(firsts),
        "cpu_seconds": statistics.median(cpus),
        "import_torch_seconds": statistics.median(imports),
        "of_import_torch": statistics.median(a / b for a, b in zip(firsts, imports, strict=True)),
    }


def _first_step(events: Path) -> float:
    """When the first step was reported, in seconds since 1970."""
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if event.get("step", 0) >= 1:
            return datetime.fromisoformat(event["time"]).timestamp()
    raise AssertionError(f"{events} has no step")


def _write_job(folder: Path, sizes: Sizes, checkpoint_every: int) -> Path:
    rng = np.random.default_rng(0)
    tokens = {}
    for part, count in (("train", 200_000), ("test", 64 * LENGTH)):
        tokens[part] = str(folder / f"tokens_{part}.npy")
        np.save(tokens[part], rng.integers(VOCAB, size=count).astype(np.uint16))
    options = {"steps": sizes.steps, "batch_size": sizes.batch_size, "clip_norm": 1.0, "warmup": 20}
    document: dict[str, Any] = {
        "model": {
            "name": "gpt",
            "input_shape": [LENGTH],
            "classes": VOCAB,
            "input_dtype": "int32",
            "task": "next_token",
            "options": {"width": sizes.width, "layers": LAYERS, "heads": HEADS},
        },
        "arrays": ".",
        "out": ".",
        "seed": 7,
        "options": options,
        "plan": {"dp": 1},
        "tokens": tokens,
    }
    if checkpoint_every:
        document["checkpoint"] = {"every": checkpoint_every}
    path = folder / "job.json"
    path.write_text(json.dumps(document))
    return path


def _batches(sizes: Sizes) -> Iterator[torch.Tensor]:
    """[B, T + 1] token ids, which lie in memory."""
    ids = torch.from_numpy(np.random.default_rng(1).integers(VOCAB, size=(64, sizes.batch_size, LENGTH + 1)))
    while True:
        yield from ids


def _plain_step(sizes: Sizes) -> Callable[[torch.Tensor], None]:
    module: nn.Module = zoo.get(
        "gpt", input_shape=(LENGTH,), classes=VOCAB, width=sizes.width, layers=LAYERS, heads=HEADS
    ).build(7)
    defaults = TrainingOptions()
    optimizer = torch.optim.AdamW(module.parameters(), defaults.lr, weight_decay=defaults.weight_decay)

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return step


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float], now: tuple[float, float]) -> tuple[float, float]:
    return now[0] - began[0], now[1] - began[1]


if __name__ == "__main__":
    run()
