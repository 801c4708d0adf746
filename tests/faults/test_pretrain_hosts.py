"""Pretraining on several hosts: network namespaces that are killed, cut off and come back; and a Slurm job without Slurm.

Their file system is this machine's, so it is shared.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.pretrain.recovery.curve import Curve
from models.pretrain.recovery.statuses import PREEMPTED, REFUSED
from tests.support.cli import FEDLOOP, Started, options, report_of, run_cli, started
from tests.support.long import LONG
from tests.support.namespaces import TwoHosts, two_hosts
from tests.support.pretraining import (
    Agent,
    change,
    children,
    curve_of,
    eventually,
    is_alive,
    kill,
    write_job,
)
from tests.support.require import require

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
SETTINGS = (
    "data.dataset=text",
    "data.length=64",
    "model.name=gpt",
    "model.width=64",
    "model.layers=2",
    "model.heads=2",
    "train.optimizer=sgd",  # with this rate, differences by order of summation do not grow; with ten times it they do after 450 steps
    "train.lr=0.0001",
    "train.warmup=0",
    "train.decay=constant",
    "train.batch_size=16",
    "checkpoint.every=5",
)


class Cluster:
    """Two namespaces as hosts, the remote shell to them, and a pretraining's folder."""

    def __init__(self, folder: Path, hosts: TwoHosts) -> None:
        self.folder, self.hosts, self.out = folder, hosts, folder / "out"
        text = folder / "plays.txt"
        text.write_text("To be, or not to be, that is the question. " * 200)
        self.settings = (*SETTINGS, f"data.path={text}")
        self.file = folder / "nodes.txt"
        lines = zip(hosts.names, hosts.addresses, strict=True)
        self.file.write_text("".join(f"{name} slots=1 address={address}\n" for name, address in lines))
        # a process of its own between the two, as sshd: killing the shell here kills nothing there
        shell = folder / "shell.sh"
        shell.write_text(
            f"""
            host=$1; shift
            if [ -e {shlex.quote(str(folder))}/$host.down ]; then echo "no route to $host" >&2; exit 255; fi
            setsid -w ip netns exec $host "$@"
            """
        )
        self.options = ("--hosts", self.file, "--remote-shell", f"sh {shell} {{host}}")

    def down(self, host: int) -> Path:
        """While this file is there, the host does not answer."""
        return self.folder / f"{self.hosts.names[host]}.down"

    def kill(self, host: int) -> None:
        self.down(host).touch()
        self.hosts.kill(host)

    def points(self) -> list[dict[str, Any]]:
        return list(Curve(self.out / "curve.jsonl").points())

    def trains(self, command: Started, plan: str, after: int) -> int:
        """Waits until it has trained more than `after` steps and goes on by `plan`; the step it is at."""
        last: Mapping[str, Any] = {}

        def reached() -> bool:
            nonlocal last
            last = next(reversed(self.points()), {"step": 0, "plan": ""})
            return last["plan"] == plan and last["step"] > after

        assert command.reaches(reached), command.errors()
        return int(last["step"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with two_hosts() as hosts:
        yield Cluster(tmp_path, hosts)


@pytest.mark.long
def test_two_hosts_killed_back_and_rescaled_with_another_plan(cluster: Cluster) -> None:
    """The losses are those of one process that nothing happened to. The long edition also kills the host of the rendezvous,
    and cuts the hosts off from each other."""
    arguments = ("pretrain", "--plan", "dp=2", *options((*cluster.settings, "train.steps=100000")))
    with started(*arguments, *cluster.options, "--out", cluster.out) as command:
        step = cluster.trains(command, "dp=2", 10)
        for host in (1, 0) if LONG else (1,):
            cluster.kill(host)
            step = cluster.trains(command, "dp=1", step + 5)
            cluster.down(host).unlink()
            step = cluster.trains(command, "dp=2", step)
        if LONG:
            cluster.hosts.pull()
            step = cluster.trains(command, "dp=1", step + 5)
            cluster.hosts.plug()
            step = cluster.trains(command, "dp=2", step)
        command.send(signal.SIGTERM)
        assert command.ended() == PREEMPTED, command.errors()
        assert "it received a signal to stop, and saved its work" in command.errors()
        assert not cluster.hosts.processes(0) + cluster.hosts.processes(1)
    steps = len(cluster.points()) + 20
    resumed = run_cli(
        "pretrain",
        "--resume",
        cluster.out,
        "--plan",
        "tp=2",
        "--set",
        f"train.steps={steps}",
        *cluster.options,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert report_of(cluster.out)["plan"] == "tp=2"
    points = cluster.points()
    assert [point["step"] for point in points] == list(range(1, steps + 1))
    assert {point["plan"] for point in points} == {"dp=1", "dp=2", "tp=2"}
    assert "[flh" in (cluster.out / "log.txt").read_text(), "lines bear the host's name"

    alone = cluster.folder / "alone"
    undisturbed = run_cli("pretrain", *options((*cluster.settings, f"train.steps={steps}")), "--out", alone)
    assert undisturbed.returncode == 0, undisturbed.stderr
    losses = [point["loss"] for point in Curve(alone / "curve.jsonl").points()]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose([point["loss"] for point in points], losses, atol=TOLERANCE)


def test_nothing_is_left_on_the_hosts_when_the_command_is_killed(cluster: Cluster) -> None:
    """The command and what it started here are killed; what runs on the hosts notices by itself."""
    arguments = ("pretrain", "--plan", "dp=2", *options((*cluster.settings, "train.steps=100000")))
    with started(*arguments, *cluster.options, "--out", cluster.out) as command:
        cluster.trains(command, "dp=2", 5)
        here, there = cluster.hosts.processes(0), cluster.hosts.processes(1)
        assert len(here) >= 3 and len(there) >= 3, "a member, its forkserver and a rank"
        command.send(signal.SIGKILL)
        assert eventually(lambda: not any(map(is_alive, here + there)))
        assert not cluster.hosts.processes(0) + cluster.hosts.processes(1)


@pytest.mark.extended
def test_hosts_die_and_join(tmp_path: Path) -> None:
    """4 -> 3 -> 4 hosts, all on this machine; the global batch of 11 rows stays, shared by however many there are."""
    training = {"steps": 20_000, "batch_size": 11, "optimizer": "sgd", "lr": 0.02}
    job = write_job(tmp_path / "spread", 20_000)
    hosts = [{"name": f"127.0.0.{number}", "address": f"127.0.0.{number}"} for number in range(1, 5)]
    settings = {"hosts": hosts, "processes": 4, "remote_shell": "env HOST={host}", "python": sys.executable}
    change(job, options=training, hosts=settings)
    agent = Agent(job, 4, module="hosts")

    def trains(plan: str, after: int) -> int:
        def last() -> dict[str, Any]:
            assert agent.process.poll() is None, agent.lines[-3:]
            return next(reversed(list(Curve(job.parent / "curve.jsonl").points())), {"step": 0, "plan": ""})

        assert eventually(lambda: last()["plan"] == plan and last()["step"] > after), last()
        return int(last()["step"])

    try:
        step = trains("dp=4", 20)
        kill(max(children(agent.process.pid)))
        step = trains("dp=3", step)
        trains("dp=4", step)
    finally:
        agent.process.kill()
        agent.process.wait()
    points = curve_of(job)
    alone = write_job(tmp_path / "alone", len(points))
    change(alone, options=training | {"steps": len(points)})
    subprocess.run([sys.executable, "-P", "-m", "models.pretrain.training_process", str(alone)], check=True)
    losses = [point["loss"] for point in curve_of(alone)]
    np.testing.assert_allclose([point["loss"] for point in points], losses, atol=TOLERANCE)


@pytest.mark.extended
def test_a_host_without_the_shared_folder_is_refused_with_the_reason(tmp_path: Path) -> None:
    """The other host has another file system over the folder."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        require("namespaces", "a mount namespace cannot be made")
    job = write_job(tmp_path, 20)
    shell = tmp_path / "shell.sh"
    shell.write_text(
        """host=$1; shift; [ $host = 127.0.0.1 ] && exec "$@"
        exec unshare -m sh -c 'mount -t tmpfs none "$0" && exec "$@"' """
        + f'{shlex.quote(str(tmp_path))} "$@"'
    )
    hosts = [{"name": name, "address": name} for name in ("127.0.0.1", "127.0.0.2")]
    settings = {
        "hosts": hosts,
        "processes": 2,
        "remote_shell": f"sh {shell} {{host}}",
        "python": sys.executable,
    }
    change(job, hosts=settings)
    agent = Agent(job, 2, module="hosts")
    assert agent.ended() == REFUSED
    assert re.search(
        r"host 127\.0\.0\.2: .*\.host-token is not there on this host: all hosts must see",
        agent.lines[-1]["error"],
    )


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of a Slurm job on two nodes, with stand-ins for srun and scontrol."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text(
        '#!/bin/sh\nwhile case $1 in --*) true;; *) false;; esac; do shift; done\nexec "$@"\n'
    )
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol.txt\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    yield {
        "PATH": f"{programs}:{FEDLOOP.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "127.0.0.[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def batch(script: str, folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The script as Slurm runs it; what is left of it at the end is killed."""
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env={**os.environ, **environment}, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.extended
def test_the_slurm_script_of_the_docs_saves_requeues_and_resumes(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "many-hosts.md").read_text()
    found = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    assert found is not None
    script = found[1].replace("--plan dp=8", "--plan dp=2")
    (tmp_path / "plays.txt").write_text("To be, or not to be, that is the question. " * 200)
    settings = {}
    for each in (*SETTINGS, "train.steps=100000", "data.path=plays.txt"):
        key, _, value = each.partition("=")
        settings[key] = value if re.fullmatch(r"[0-9.]+", value) else json.dumps(value)
    (tmp_path / "plays.toml").write_text("".join(f"{key} = {value}\n" for key, value in settings.items()))
    out = tmp_path / "runs" / "plays"
    with slurm(tmp_path) as environment:
        done = 0
        for _ in range(2):  # the second resumes
            with batch(script, tmp_path, environment) as process:
                assert eventually(partial(_trained, process, out, done + 10))
                process.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@180
                assert process.wait(300) == PREEMPTED
                done = steps(out)
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 77\n" * 2
    points = list(Curve(out / "curve.jsonl").points())
    assert [point["step"] for point in points] == list(range(1, len(points) + 1))
    assert {point["plan"] for point in points} == {"dp=2"}


def _trained(process: subprocess.Popen[bytes], out: Path, more_than: int) -> bool:
    assert process.poll() is None, "the script has ended"
    return steps(out) > more_than


def steps(out: Path) -> int:
    return len(list(Curve(out / "curve.jsonl").points()))
