"""A parameter server trains what DDP trains; who is late waits or is dropped as configured; servers may die."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed.rpc as rpc

from edge_client.processes.process import worker_environment
from models import job as jobs
from models.pretrain.parameter_server import (
    check,
    replica,
    rules,
)
from models.pretrain.parameter_server.__main__ import survivable
from models.pretrain.parameter_server.rules import (
    AsyncRule,
    Contribution,
    SyncRule,
)
from models.pretrain.parameter_server.settings import Servers
from models.pretrain.parameter_server.shard import split
from tests.models.pretrain import curves, serving
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds


TOLERANCE = 1e-5
LONG = 60
"""Steps after which a training must have learned."""
PART = "tests.models.pretrain.serving:part"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture(scope="module")
def ddp() -> list[float]:
    losses: list[float] = ranks.run(2, "tests.models.pretrain.curves:curve", "dp=2")[0]
    return losses


def run(what: str, store: str, *args: Any, **table: Any) -> tuple[list[Any], list[Any]]:
    """What workers and servers found, by rank."""
    servers = Servers(**table)
    found: list[Any] = ranks.run(servers.processes, what, store, *args, **table)
    return found[: servers.workers], found[servers.workers :]


@pytest.mark.parametrize(("servers", "replicas"), [(2, 1), (1, 2), *extended((1, 1))])
def test_synchronous_server_trains_what_ddp_trains(
    servers: int, replicas: int, store: str, ddp: list[float]
) -> None:
    workers, kept = run(PART, store, workers=2, servers=servers, replicas=replicas)
    np.testing.assert_allclose(workers[0]["records"][0]["losses"], ddp, atol=TOLERANCE)
    for record in workers[0]["records"]:
        assert record["updates"] == curves.STEPS
        assert record["staleness"] == {0: 2 * curves.STEPS}
    for shard in range(servers):
        theirs = [one["values"] for one in kept[shard * replicas : (shard + 1) * replicas]]
        for values in theirs[1:]:
            for one, other in zip(theirs[0], values, strict=True):
                np.testing.assert_array_equal(one, other)  # a backup has exactly what the primary has
    assert sum(len(kept[shard * replicas]["values"]) for shard in range(servers)) == len(workers[0]["values"])


@pytest.mark.parametrize("bound", [2, *extended(0)])
def test_worker_waits_when_it_is_too_far_ahead(bound: int, store: str) -> None:
    # the slow worker begins when the other cannot go on without it
    asleep = "tests.models.pretrain.serving:part_with_last_worker_asleep"
    workers, (kept,) = run(asleep, store, bound + 1, LONG, workers=2, mode="ssp", staleness=bound)
    assert max(kept["record"]["lead"]) == bound
    assert kept["record"]["updates"] == 2 * LONG
    assert_converges(workers[0]["records"][0]["losses"])


@pytest.mark.extended
def test_without_a_bound_a_worker_runs_ahead_to_the_end(store: str) -> None:
    asleep = "tests.models.pretrain.serving:part_with_last_worker_asleep"
    workers, (kept,) = run(asleep, store, LONG, LONG, workers=2, mode="async")
    assert max(kept["record"]["lead"]) == LONG
    assert max(kept["record"]["staleness"]) >= LONG
    assert kept["record"]["updates"] == 2 * LONG
    assert_converges(workers[0]["records"][0]["losses"])


def test_k_of_n_drops_what_a_sleeping_worker_sends(store: str) -> None:
    asleep = "tests.models.pretrain.serving:part_with_last_worker_asleep"
    workers, (kept,) = run(asleep, store, curves.STEPS, workers=3, mode="k-of-n", keep=2)
    losses, values = serving.without_server(workers=3, heard=2)
    np.testing.assert_allclose(workers[0]["records"][0]["losses"], losses, atol=TOLERANCE)
    for found, expected in zip(kept["values"], values, strict=True):
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert (kept["record"]["updates"], kept["record"]["dropped"]) == (curves.STEPS, 1)


@pytest.mark.parametrize(
    ("mode", "when"),
    [("sync", "after"), *extended(("sync", "before"), ("async", "before"), ("async", "after"))],
)
def test_backup_serves_on_without_a_lost_update_when_the_primary_is_killed(
    mode: str, when: str, store: str, ddp: list[float]
) -> None:
    dying = "tests.models.pretrain.serving:part_with_dying_primary"
    workers, (primary, backup) = run(dying, store, 3, when, workers=2, replicas=2, mode=mode)
    assert primary["status"] == -signal.SIGKILL
    assert [worker["failovers"] for worker in workers] == [1, 1]
    record = backup["record"]
    # every contribution once: none lost, none of those sent again counted twice
    assert sum(record["staleness"].values()) == 2 * curves.STEPS
    assert record["dropped"] == 0
    if mode == "sync":
        np.testing.assert_allclose(record["losses"], ddp, atol=TOLERANCE)
    else:
        assert record["updates"] == 2 * curves.STEPS


def test_backup_that_missed_updates_is_noticed(store: str) -> None:
    dying = "tests.models.pretrain.serving:part_with_dying_primary"
    with pytest.raises(ranks.RankFailed, match="missed updates"):
        run(dying, store, 3, "unreplicated", workers=2, replicas=2)


@pytest.mark.extended
def test_job_ends_well_though_its_primary_is_killed(tmp_path: Path) -> None:
    steps = 150
    job = a_job(tmp_path, {"workers": 2, "replicas": 2}, steps=steps)
    command = [sys.executable, "-P", "-m", "models.pretrain.parameter_server", str(job)]
    pids: dict[str, int] = {}
    with subprocess.Popen(
        command, env=worker_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as running:
        assert running.stdout is not None
        lines = [json.loads(line) for line in _killing(running.stdout, pids, "server0-0")]
    assert running.returncode == 0, lines
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failovers"] == 1
    assert result["server"] == "workers=2,servers=1,mode=sync,replicas=2"
    assert len(result["losses"]) == steps
    assert_converges(result["losses"])
    assert (tmp_path / "model.safetensors").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def _killing(lines: Iterator[str], pids: dict[str, int], who: str) -> Iterator[str]:
    """`lines`, and kills the process `who` as soon as there is progress."""
    for line in lines:
        progress_line = json.loads(line)
        if progress_line["stage"] == "serve":
            pids[progress_line["process"]] = progress_line["pid"]
        elif progress_line["step"] == 1:
            os.kill(pids[who], signal.SIGKILL)
        yield line


def test_replica_that_was_given_up_answers_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    of = serving.training(Servers(workers=2, replicas=2, mode="async"))
    primary, backup = of.replica(2), of.replica(3)
    monkeypatch.setattr(rpc, "rpc_sync", lambda to, function, args, timeout: backup.follow(*args))
    gradients = [value * 0 for value in primary.shard.values()]

    def pushed(to: replica.Replica, worker: int, clock: int, version: int) -> replica.Reply | None:
        found: replica.Reply | None = to.push(Contribution(worker, clock, version, 1.0, gradients)).wait()
        return found

    first = pushed(primary, 0, 0, 0)
    assert first is not None
    assert (first.clock, first.version) == (1, 1)
    second = pushed(backup, 1, 0, 0)  # a worker takes the primary for dead
    assert second is not None
    assert second.version == 2  # the backup had the first update
    assert pushed(primary, 0, 1, 1) is None
    again = pushed(backup, 0, 1, 1)
    assert again is not None
    assert again.version == 3
    repeated = pushed(backup, 0, 1, 1)  # its answer was lost
    assert repeated is not None
    assert repeated.version == 3


def test_a_wrong_push_is_refused_and_the_server_goes_on() -> None:
    of = serving.training(Servers(workers=2, mode="async"))
    server = of.replica(2)
    gradients = [value * 0 for value in server.shard.values()]
    for wrong, reason in (
        (Contribution(2, 0, 0, 1.0, gradients), "no worker 2, expected 0 to 1"),
        (Contribution(-1, 0, 0, 1.0, gradients), "no worker -1"),
        (Contribution(0, 10**6, 0, 1.0, gradients), "pushes for batch 1000000"),
        (Contribution(0, 0, 0, 1.0, gradients[1:]), "gradients of shapes"),
    ):
        with pytest.raises(ValueError, match=reason):
            server.push(wrong)
    with pytest.raises(ValueError, match="no worker 7"):
        server.leave(7)
    for worker in (0, 1):
        answer = server.push(Contribution(worker, 0, 0, 1.0, gradients)).wait()
        assert answer is not None and answer.clock == 1
    assert server.record()["updates"] == 2


def test_contributions_that_are_late_are_dropped_and_repeated_ones_are_not() -> None:
    rule = SyncRule(workers=3, needed=2)
    for worker in (2, 0):
        rule.offer(contribution(worker, 0))
    assert [one.worker for one in rule.next()] == [0, 2]  # in order, whoever was first
    rule.applied(rule.next())
    rule.offer(contribution(0, 0))
    assert rule.dropped == 0
    rule.offer(contribution(1, 0))
    assert rule.dropped == 1
    assert [rule.next_clock(worker) for worker in range(3)] == [1, 1, 1]


def test_contribution_of_a_worker_that_is_ahead_waits_for_its_turn() -> None:
    rule = SyncRule(workers=2, needed=2)
    rule.offer(contribution(0, 1))
    assert rule.next() == []
    assert rule.next_clock(0) is None
    for worker in (0, 1):
        rule.offer(contribution(worker, 0))
    rule.applied(rule.next())
    rule.offer(contribution(1, 1))
    assert len(rule.next()) == 2


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_order_of_arrivals_breaks_the_bound(bound: int) -> None:
    rng = np.random.default_rng(bound)
    for _ in range(50):
        rule, clocks = AsyncRule(3, bound), [0, 0, 0]
        for worker in rng.integers(3, size=60):
            if clocks[worker] and rule.next_clock(worker) is None:
                continue
            rule.offer(contribution(int(worker), clocks[worker]))
            rule.applied(rule.next())
            clocks[worker] += 1
            assert max(clocks) - min(clocks) <= bound + 1
        assert all(rule.lead(w) <= bound for w in range(3) if rule.next_clock(w) is not None)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_params_are_split_by_bytes(shards: int) -> None:
    module = curves.small_gpt().build(0)
    found = split(module, shards)
    assert {id(p) for p in itertools.chain(*found)} == {id(p) for p in module.parameters()}
    sizes = [sum(p.nbytes for p in shard) for shard in found]
    assert max(sizes) - min(sizes) <= max(p.nbytes for p in module.parameters())
    assert max(sizes) <= 1.1 * sum(sizes) / shards


@pytest.mark.parametrize(
    ("table", "options", "reason"),
    [
        ({"mode": "k-of-n"}, {}, "keep is 0, expected 1 to 2"),
        ({"keep": 1}, {}, "keep goes with mode k-of-n"),
        ({"staleness": 1}, {}, "staleness goes with mode ssp"),
        ({"servers": 2}, {"clip_norm": 1.0}, "clip_norm needs one server"),
        ({"workers": 9}, {}, "cannot be shared by 9 workers"),
        ({"mode": "lazy"}, {}, "server.mode is 'lazy'"),
    ],
)
def test_impossible_server_is_refused(
    table: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(jobs.JobError, match=reason):
        check.from_job(jobs.read(a_job(tmp_path, table, **options)))


def test_job_bears_the_loss_of_what_is_there_twice() -> None:
    servers = Servers(workers=3, servers=2, mode="k-of-n", keep=2, replicas=2)
    assert survivable(servers, {3, 5})
    assert not survivable(servers, {3, 4})
    assert survivable(servers, {2})
    assert not survivable(servers, {1, 2})
    assert not survivable(servers, {0})
    assert not survivable(Servers(workers=3), {2})
    assert isinstance(rules.from_settings(servers), SyncRule)


def contribution(worker: int, clock: int) -> Contribution:
    return Contribution(worker, clock, 0, 0.0)


def assert_converges(losses: list[float]) -> None:
    # Who comes first is for the clock to decide, so single batches scatter from run to run, and so does how fast it learns.
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:3])


def a_job(folder: Path, table: dict[str, Any], **options: Any) -> Path:
    """A job file for the small GPT of `curves`."""
    data = curves.tokens()
    (folder / "arrays").mkdir()
    for name, array in (("x", data.x), ("y", data.y)):
        for part in ("train", "test"):
            np.save(folder / "arrays" / f"{name}_{part}.npy", array)
    model = {"name": "gpt", "options": {"width": 32, "layers": 4, "heads": 4}, "input_shape": [curves.LENGTH]}
    settings = {
        "model": {**model, "classes": curves.VOCAB, "input_dtype": "int32", "task": "next_token"},
        "arrays": "arrays",
        "out": ".",
        "seed": serving.SEED,
        "options": {"batch_size": curves.BATCH, "lr": 1e-2, "eps": 1e-6, "steps": curves.STEPS, **options},
        "server": table,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(settings))
    return path
