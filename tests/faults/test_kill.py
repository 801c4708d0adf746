"""SIGKILL at any moment of a run: it resumes, and ends in the very model an undisturbed run ends in.

The moments are drawn by a seed and told by progress, never by time: bytes the run has written. One run is
killed at each of them in turn and resumed each time, so that every later kill hits a run that was resumed
already. After each kill the committed model must be, bit for bit, the undisturbed run's of that round.
`python -m tests.bench --only simulation_kills` is the long edition.
"""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import (
    Started,
    no_shared_memory_left,
    options,
    report_of,
    run_cli,
    run_here,
    simulate,
    started,
)

pytestmark = pytest.mark.slow

ROUNDS = 8
# Clients answer out of order, and some never do.
SETTINGS = (
    "federation.clients=8",
    "federation.clients_per_round=5",
    "federation.over_select=1.4",
    f"federation.rounds={ROUNDS}",
    "local.epochs=1",
    "simulation.speed_spread=0.5",
    "simulation.dropout=0.1",
)
# With scaffold every client has state too, with fedadam the server's optimizer has.
MIXED = (*SETTINGS, "federation.runtimes={litert=0.5, torch=0.5}", "strategy.name=fedadam")
# By the pool, whose rounds are so long that each is committed before the next.
TORCH = (*SETTINGS, "federation.runtimes={torch=1}", "strategy.name=scaffold", "simulation.engine=pool")

BUFFERED = (
    *SETTINGS,
    "federation.over_select=1",
    "federation.buffer=2",
    "federation.runtimes={torch=1}",
    "strategy.name=fedbuff",
)


@pytest.mark.extended
def test_a_run_killed_anywhere_ends_in_the_model_of_an_undisturbed_one(tmp_path: Path) -> None:
    killed_anywhere(tmp_path, 1, MIXED, 11, kills_in_rounds=3)


def test_state_of_clients_survives_kills_between_rounds_too(tmp_path: Path) -> None:
    killed_anywhere(tmp_path, 2, TORCH, 12, kills_in_rounds=2, only_in_rounds=True)


@pytest.mark.extended
def test_local_tensors_of_clients_survive_kills_between_rounds_too(tmp_path: Path) -> None:
    local = (*SETTINGS, "federation.runtimes={torch=1}", "strategy.name=fedrep", "strategy.head_epochs=1")
    killed_anywhere(tmp_path, 2, local, 14, kills_in_rounds=2, only_in_rounds=True)


def killed_anywhere(
    folder: Path,
    workers: int,
    settings: tuple[str, ...],
    seed: int,
    kills_in_rounds: int,
    only_in_rounds: bool = False,
) -> int:
    """Kills a run while its data, model and first round are made, in rounds and in its report; how many times."""
    # The undisturbed run has the other number of workers: that must not matter either.
    undisturbed = folder / "undisturbed"
    expected = simulate(undisturbed, [*settings, f"simulation.workers={3 - workers}"])
    bases = _bases(undisturbed) | {ROUNDS: expected["final"]["model_sha256"]}
    out = folder / "killed"

    committed = set()
    with no_shared_memory_left():
        points = _kill_points(out, undisturbed, seed, kills_in_rounds)
        if only_in_rounds:
            points = points[3:-1]
        for point in points:
            command: list[str | Path] = ["simulate", "--resume", out]
            if not (out / "experiment.toml").exists():
                command = ["simulate", "--out", out, *options([*settings, f"simulation.workers={workers}"])]
            with started(*command) as run:
                assert run.reaches(lambda: point(run)), run.errors()  # noqa: B023 - called at once
                run.send_group(signal.SIGKILL)
                assert run.ended() == -signal.SIGKILL
                assert run.all_gone(), run.alive()
            committed.add(_assert_whole(out, bases))
        last = run_cli("simulate", "--resume", out)
        assert last.returncode == 0, last.stderr

    assert only_in_rounds or 0 in committed
    assert len(committed) >= 2 + (0 if only_in_rounds else kills_in_rounds // 3), (
        "the kills did not spread over the rounds"
    )
    report = report_of(out)
    assert report["final"] == expected["final"]
    assert [_timeless(row) for row in report["rounds"]] == [_timeless(row) for row in expected["rounds"]]
    assert _rounds_in_csv(out) == list(range(1, ROUNDS + 1))
    assert [e["round"] for e in _events(out) if e["event"] == "round_committed"] == list(range(1, ROUNDS + 1))
    assert {path.name for path in out.iterdir()} == {path.name for path in undisturbed.iterdir()}

    again = run_here("simulate", "--resume", out)
    assert again.returncode == 0 and "already finished" in again.stderr
    return len(points)


@pytest.mark.extended
def test_clients_at_work_in_an_asynchronous_run_survive_kills_between_steps(tmp_path: Path) -> None:
    killed_anywhere(tmp_path, 2, BUFFERED, 13, kills_in_rounds=2, only_in_rounds=True)


@pytest.mark.parametrize("moment", ["models.conversion.convert", "round_started"])
def test_workers_die_with_a_parent_that_is_killed_alone(tmp_path: Path, moment: str) -> None:
    out = tmp_path / "run"
    converts = moment == "models.conversion.convert"

    def is_now() -> bool:
        if converts:
            return any(moment in words for words in run.alive())
        return moment in _text(out / "events.jsonl")

    # A cache of its own, where nothing was converted yet.
    cache = {"FEDLOOP_CACHE_DIR": str(tmp_path / "cache")} if converts else {}
    with no_shared_memory_left(), started("simulate", "--out", out, *options(MIXED), env=cache) as run:
        assert run.reaches(is_now), run.errors()
        assert any("coordinator.workers.worker" in words for words in run.alive())
        run.send(signal.SIGKILL)
        assert run.ended() == -signal.SIGKILL
        assert run.all_gone(), run.alive()


@pytest.mark.extended
def test_workers_killed_in_mid_round_change_nothing(tmp_path: Path) -> None:
    """As the kernel does when memory is short: one worker of two, then the process that they are forked from."""
    undisturbed = simulate(tmp_path / "undisturbed", [*TORCH, "simulation.workers=1"])
    out = tmp_path / "run"
    with (
        no_shared_memory_left(),
        started("simulate", "--out", out, *options([*TORCH, "simulation.workers=2"])) as run,
    ):
        for rounds, victim in ((1, -1), (3, 0)):
            begins = f'"round_started", "round": {rounds}'
            assert run.reaches(lambda: begins in _text(out / "events.jsonl")), run.errors()  # noqa: B023 - called at once
            os.kill(sorted(run.pids_of("coordinator.workers.worker"))[victim], signal.SIGKILL)
        code, errors = run.ended(), run.errors()
        assert run.all_gone(), run.alive()
    assert code == 0, errors
    report = report_of(out)
    assert report["final"] == undisturbed["final"]
    assert [_timeless(row) for row in report["rounds"]] == [_timeless(row) for row in undisturbed["rounds"]]


KILLER = """
import os
import signal

import torch
from torch import nn


class Net(nn.Linear):
    def forward(self, x):
        if self.training and len(x) > 20:  # as only one client has
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x.flatten(1))


def build(input_shape, classes):
    return Net(4, classes)
"""


def test_a_client_that_ends_its_worker_each_time_is_rejected_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    out = tmp_path / "run"
    rows = ["a,b,c,d,label,site"]
    for site, count in (("one", 20), ("two", 40), ("three", 20)):
        rows += [f"{i % 7},{i % 5},{i % 3},{i % 2},{'yes' if i % 3 else 'no'},{site}" for i in range(count)]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    report = simulate(
        out,
        [
            'data.dataset="csv"', f'data.path="{tmp_path / "rows.csv"}"', 'data.site="site"',
            'data.partition="natural"', 'model.name="killer:build"', "federation.rounds=1",
            "federation.runtimes={torch=1}", "local.epochs=1", "local.batch_size=64", "simulation.workers=2",
            'simulation.local_baseline="off"',
        ],
        cwd=tmp_path,
    )  # fmt: skip
    (row,) = report["rounds"]
    assert (row["accepted"], row["rejections"]) == (2, {"crashed": 1})
    (rejected,) = [each for each in _events(out) if each["event"] == "update_rejected"]
    assert rejected["client"] == "two"
    assert "has ended 3 worker processes, the last with signal 9" in rejected["words"]


def _kill_points(out: Path, undisturbed: Path, seed: int, in_rounds: int) -> list[Callable[[Started], bool]]:
    """Conditions in the order of a run: while data, model and first round are made, in rounds, in the report."""
    rng = np.random.default_rng(seed)
    text = _text(undisturbed / "events.jsonl")
    first = text.index('"round_committed"')
    prepared = int(rng.integers(1, 400_000))
    progress = sorted(rng.choice(np.arange(first, int(len(text) * 0.97)), in_rounds, replace=False))
    before_commit = int(rng.integers(1, first))
    return [
        lambda run: _bytes_in(out / "work") >= prepared,
        lambda run: (out / "work" / "found.json").exists(),
        *(_progress_of(out, threshold) for threshold in (before_commit, *progress)),
        lambda run: (out / "model.safetensors").exists(),
    ]


def _progress_of(out: Path, threshold: int) -> Callable[[Started], bool]:
    def is_reached(run: Started) -> bool:
        lines = _text(out / "events.jsonl").splitlines(keepends=True)
        return sum(len(line) for line in lines if '"run_resumed"' not in line) >= threshold

    return is_reached


def _assert_whole(out: Path, bases: dict[int, str]) -> int:
    """The committed round of a killed run, whose model is the undisturbed run's and whose files are readable."""
    committed = 0
    pointer = out / "checkpoint" / "checkpoint.json"
    if pointer.exists():
        document = json.loads(pointer.read_text())
        committed = document["round"]
        assert document["params"] == bases[committed]
    if (out / "rounds.csv").exists():
        # A round's line follows its commit; resuming writes it where the kill came between the two.
        assert _rounds_in_csv(out) in [list(range(1, n + 1)) for n in (committed, committed - 1)]
    events = _events(out)
    assert all(bases[e["round"] - 1] == e["base"] for e in events if e["event"] == "round_started")
    started_rounds = [e["round"] for e in events if e["event"] == "round_started"]
    assert all(later == earlier + 1 for earlier, later in pairwise(started_rounds))
    return committed


def _bases(out: Path) -> dict[int, str]:
    """Round -> hash of the model as of its end (0: the first model), but for the last round."""
    return {e["round"] - 1: e["base"] for e in _events(out) if e["event"] == "round_started"}


def _events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(out / "events.jsonl").splitlines()]


def _rounds_in_csv(out: Path) -> list[int]:
    return [int(row["round"]) for row in csv.DictReader(_text(out / "rounds.csv").splitlines())]


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


def _bytes_in(folder: Path) -> int:
    """Of the data's arrays."""
    return sum(path.stat().st_size for path in folder.glob("*.npy"))
