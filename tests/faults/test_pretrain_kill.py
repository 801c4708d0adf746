"""SIGKILL of a worker or of the launcher: a pretraining goes on from its last checkpoint, on one curve."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.pretrain.recovery.statuses import PREEMPTED, REFUSED
from tests.support.pretraining import (
    change,
    curve_of,
    is_alive,
    kill,
    training,
    write_job,
)

pytestmark = pytest.mark.slow

STEPS, EVERY = 120, 5
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process that nothing happened to."""
    job = write_job(tmp_path_factory.mktemp("undisturbed"), STEPS)
    subprocess.run([sys.executable, "-P", "-m", "models.pretrain.training_process", str(job)], check=True)
    losses: list[float] = json.loads((job.parent / "result.json").read_text())["losses"]
    assert len(losses) == STEPS
    return losses


def test_killed_workers_start_again_on_the_same_curve(tmp_path: Path, undisturbed: list[float]) -> None:
    """Whichever dies, the first or another, at most one interval and what was being written is lost."""
    job = write_job(tmp_path, STEPS)
    with training(job, 2) as agent:
        for number, victim in enumerate((0, -1)):
            at = agent.reaches(30 + 40 * number)["step"]
            heard = len(agent.lines)
            kill(sorted(agent.workers)[victim])
            agent.waits_for(lambda line: line.get("status") == "restarting", heard)
            again = agent.waits_for(lambda line: "step" in line and "loss" not in line, heard)["step"]
            # the checkpoint of the last interval may have been under way
            assert at - 2 * EVERY <= again, (at, again)
        assert agent.ended() == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["restarts"] == 2
    np.testing.assert_allclose(result["losses"], undisturbed, atol=TOLERANCE)
    assert [point["loss"] for point in curve_of(job)] == result["losses"]
    assert {point["restart"] for point in curve_of(job)} == {0, 1, 2}


def test_workers_never_meet_at_the_store_of_the_rendezvous() -> None:
    """There a restarted process finds the keys of its predecessor. Torch has them meet there, unless told otherwise."""
    asks = (
        "import os; os.environ['TORCH_DISABLE_SHARE_RDZV_TCP_STORE'] = '0'\n"
        "from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler as H\n"
        "print(H.use_agent_store.fget(None))\n"
        "from models.pretrain.recovery import elastic\n"
        "print(H.use_agent_store.fget(None))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", asks], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"]


def test_everything_dies_with_the_launcher(tmp_path: Path) -> None:
    job = write_job(tmp_path, 100_000)
    with training(job, 2) as agent:
        agent.reaches(10)
        tree = agent.workers
        assert len(tree) == 2
        agent.process.kill()
        agent.ended()  # its output ends when nobody holds the pipe any more
    assert not [process for process in tree if is_alive(process)]


@pytest.mark.extended
def test_a_preempted_training_moves_to_another_folder_and_plan(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    job = write_job(tmp_path / "here", STEPS, plan={"dp": 2})
    change(job, checkpoint={"every": 100_000})  # so that nothing but the preemption saves
    with training(job, 2) as agent:
        agent.reaches(40)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.ended() == PREEMPTED
        assert agent.lines[-1]["status"] == "preempted"
        stopped = agent.lines[-1]["step"]
    assert 40 < stopped < STEPS
    assert not (tmp_path / "here" / "result.json").exists()
    moved = job.parent.rename(tmp_path / "there") / "job.json"
    change(moved, plan={"tp": 2}, checkpoint={"every": 50})
    with training(moved, 2) as agent:
        assert agent.waits_for(lambda line: "step" in line)["step"] == stopped
        assert agent.ended() == 0
    result = json.loads((tmp_path / "there" / "result.json").read_text())
    assert result["plan"] == "tp=2"
    np.testing.assert_allclose(result["losses"], undisturbed, atol=TOLERANCE)


@pytest.mark.extended
def test_a_wrong_job_is_refused_once(tmp_path: Path) -> None:
    job = write_job(tmp_path, STEPS)
    change(job, checkpoint={"evry": 5})
    with training(job, 2) as agent:
        assert agent.ended() == REFUSED
    assert all("did you mean 'every'?" in line["error"] for line in agent.lines)
    assert 1 <= len(agent.lines) <= 2
