"""What `fedloop pretrain --hosts` refuses, and the job that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.datacenter import pretrain_config, pretrain_hosts
from coordinator.datacenter.jobs import DatacenterJob
from coordinator.errors import UserError
from models.job import JobFile
from models.pretrain.hosts.hostfile import SRUN, Host, HostSettings
from models.pretrain.plan import Sizes
from tests.support.cli import assert_refused, run_cli, run_here

SHELL = "env HOST={host}"


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.txt"
    path.write_text("127.0.0.1 slots=2\n127.0.0.2\n")
    return path


REFUSED = {
    "more processes than slots": (("--plan", "dp=4"), "the plan needs 4 processes, the hosts have 3 slots"),
    "no checkpoints": (("--set", "checkpoint.every=0"), "checkpoint.every is 0; set it above 0"),
    "a parameter server": (("--set", "server.workers=2"), "trains on this machine only"),
    "slots of this machine": (("--slots", "2"), "with --hosts the file says how many slots a host has"),
    "a shell without a host": (("--remote-shell", "ssh"), "expected a command with {host}"),
    "an interpreter with spaces": (("--remote-python", "/my python"), "a remote shell may interpret"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_hosts_is_refused(case: str, tmp_path: Path, nodes: Path) -> None:
    arguments, reason = REFUSED[case]
    out = tmp_path / "out"
    given = (() if "--remote-shell" in arguments else ("--remote-shell", SHELL)) + arguments
    assert_refused(run_here("pretrain", "--hosts", nodes, *given, "--out", out), reason)
    assert not out.exists()


def test_bad_files_and_options_without_hosts_are_refused(tmp_path: Path, nodes: Path) -> None:
    nodes.write_text("a\nb slots=x\n")
    assert_refused(run_here("pretrain", "--hosts", nodes), f"--hosts {nodes}: line 2: slots=x of b")
    assert_refused(run_here("pretrain", "--hosts", tmp_path / "none"), "cannot be read")
    assert_refused(run_here("pretrain", "--remote-python", "/bin/python3"), "--remote-python needs --hosts")
    assert_refused(run_here("pretrain", "--hosts", "slurm"), "SLURM_JOB_NODELIST is not set")


def test_in_slurm_processes_start_by_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "127.0.0.[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    hosts = pretrain_hosts.load("slurm", None, None)
    assert hosts.remote_shell == SRUN
    assert hosts.hosts == (Host("127.0.0.1", 4, "127.0.0.1"), Host("127.0.0.2", 4, "127.0.0.2"))


def test_the_job_leaves_dp_to_the_hosts_that_are_there(nodes: Path) -> None:
    hosts = pretrain_hosts.load(str(nodes), SHELL, None)
    job = DatacenterJob(
        "pretrain", {}, Path("arrays"), plan={"dp": 3, "tp": 1}, processes=3, more={"resume": True}
    )
    applied = hosts.applied_to(job, {"layers": 2})
    assert (applied.plan, applied.processes) == ({"tp": 1}, 3)
    read = JobFile(Path("job.json"), applied.more).table("hosts", HostSettings)
    assert read == HostSettings(hosts.hosts, 3, SHELL, hosts.python, Sizes(layers=2))


def test_hosts_are_checked_before_anything_is_loaded(nodes: Path) -> None:
    hosts = pretrain_hosts.load(str(nodes), SHELL, None)
    hosts.check(pretrain_config.resolve({"plan": {"dp": 3}}, "test"))
    with pytest.raises(UserError, match="raise slots=N in the hosts file"):
        hosts.check(pretrain_config.resolve({"plan": {"dp": 2, "tp": 2}}, "test"))


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_named_with_what_its_shell_said(tmp_path: Path, nodes: Path) -> None:
    shell = tmp_path / "shell.sh"
    shell.write_text(
        '[ $1 = 127.0.0.2 ] && { echo "Permission denied (publickey)." >&2; exit 255; }; shift; exec "$@"\n'
    )
    out = tmp_path / "out"
    done = run_cli(
        "pretrain", "--hosts", nodes, "--remote-shell", f"sh {shell} {{host}}", "--plan", "dp=3",
        "--set", "model.name=mlp", "--out", out,
    )  # fmt: skip
    assert done.returncode == 1
    assert "host 127.0.0.2: Permission denied (publickey)." in done.stderr
    assert not (out / "curve.jsonl").exists()
