"""The hosts of a training: their file, Slurm's environment, how processes are spread, and what connects them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from models.pretrain import plan as plans
from models.pretrain import world
from models.pretrain.hosts import hostfile, interfaces
from models.pretrain.hosts.__main__ import passed
from models.pretrain.hosts.allocation import Limits, fill
from models.pretrain.hosts.hostfile import Host, HostsError, HostSettings
from models.pretrain.hosts.member import _folder_problem
from models.pretrain.plan import Sizes
from models.pretrain.recovery import store
from models.pretrain.training import TrainingOptions
from tests.support import ranks

GPT = Sizes(layers=4, heads=4, width=32, hidden=128, vocab=51, length=16, attention=True, tensor=True)


def test_a_hosts_file_is_that_of_mpirun() -> None:
    text = "# cluster\n\nnode1 slots=4   # the first\nada@node2 address=10.0.0.2 slots=2\nnode3\n"
    assert hostfile.parse(text, "file") == [
        Host("node1", 4),
        Host("ada@node2", 2, "10.0.0.2"),
        Host("node3", 1),
    ]


BAD_LINES = {
    "node1 slots=four": "slots=four of node1: expected a whole number from 1 to 1024",
    "node1 slots=0": "slots=0 of node1",
    "node1 slot=4": "'slot=4' after node1: expected slots=N or address=IP",
    "node1 4": "'4' after node1",
    "node1 slots=1 slots=2": "slots is given twice",
    "$(reboot)": "is no host name",
    "-oProxyCommand=reboot": "is no host name",
    "good": "good is named twice",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_lines_are_refused_by_number(line: str) -> None:
    with pytest.raises(HostsError) as refused:
        hostfile.parse(f"good\n{line}\n", "--hosts file")
    assert str(refused.value).startswith("--hosts file: line 2: ")
    assert BAD_LINES[line] in str(refused.value)


def test_every_bad_line_is_named_and_an_empty_file_refused() -> None:
    with pytest.raises(HostsError, match=r"(?s)line 1: .*line 3: "):
        hostfile.parse("a b\nc\nd e", "file")
    with pytest.raises(HostsError, match="there is no host in it"):
        hostfile.parse("# nobody\n", "file")


def test_slurms_nodes_and_tasks_are_read() -> None:
    environment = {"SLURM_JOB_NODELIST": "node[01-02,07],gpu3", "SLURM_TASKS_PER_NODE": "4(x2),3,1"}
    assert hostfile.from_slurm(environment) == [
        Host("node01", 4),
        Host("node02", 4),
        Host("node07", 3),
        Host("gpu3", 1),
    ]
    assert list(hostfile.expand("r[1-2]n[08-09]")) == ["r1n08", "r1n09", "r2n08", "r2n09"]
    with pytest.raises(HostsError, match="SLURM_JOB_NODELIST is not set"):
        hostfile.from_slurm({})
    with pytest.raises(HostsError, match="counts 1 nodes"):
        hostfile.from_slurm({"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2"})
    with pytest.raises(HostsError, match="no range"):
        hostfile.from_slurm({"SLURM_JOB_NODELIST": "a[3-1]", "SLURM_TASKS_PER_NODE": "2"})


def test_loopback_addresses_are_refused_among_several_hosts() -> None:
    assert hostfile.resolve([Host("localhost")]) == [Host("localhost", 1, "127.0.0.1")]
    with pytest.raises(HostsError, match=r"localhost has the address 127\.0\.0\.1 here, .* add address=IP"):
        hostfile.resolve([Host("localhost"), Host("far", 1, "192.0.2.9")])
    with pytest.raises(HostsError, match="no IPv4 address here"):
        hostfile.resolve([Host("no-such-host.invalid")])


def test_nothing_in_a_remote_command_means_anything_to_a_shell() -> None:
    settings = HostSettings((), 1, "ssh -q {host}", "/opt/my python/bin/python")
    with pytest.raises(HostsError, match="--remote-python"):
        hostfile.remote_command(settings, Host("a"), "-m", "json")
    fine = HostSettings((), 1, "ssh -q {host} env A=1", "/opt/bin/python3.11")
    assert " ".join(hostfile.remote_command(fine, Host("a"), "-m", "json")) == (
        "ssh -q a env A=1 /opt/bin/python3.11 -P -m json"
    )
    assert hostfile.remote_command(fine, Host("localhost"), "x")[0] == "/opt/bin/python3.11"
    with pytest.raises(HostsError, match=r"expected a command with \{host\}"):
        hostfile.check_remote_shell("ssh")


def test_secrets_of_this_machine_are_not_passed_on() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "FEDLOOP_ADMIN_TOKEN": "secret",
        "PATH": "/bin",
        "OMP_NUM_THREADS": "3",
    }
    given_on = passed(environment)
    assert given_on["NCCL_DEBUG"] == "INFO"
    assert given_on["OMP_NUM_THREADS"] == "3"
    assert not {"FEDLOOP_ADMIN_TOKEN", "PATH"} & set(given_on)


def limits(plan: str, batch_size: int = 16, processes: int = 8) -> Limits:
    table = {key: value for key, _, value in (part.partition("=") for part in plan.split(",") if part)}
    return Limits(table, processes, GPT, TrainingOptions(batch_size=batch_size))


def test_with_fewer_hosts_dp_shrinks_and_the_other_degrees_stay() -> None:
    hosts = [Host("a", 4), Host("b", 4), Host("c", 2)]
    spread = limits("tp=2,pp=2").allocate
    full, two, one = spread(hosts), spread(hosts[1:]), spread(hosts[:1])
    assert full is not None and two is not None and one is not None
    assert (str(full.plan), dict(full.ranks)) == ("dp=2,tp=2,pp=2", {"a": 4, "b": 4})
    assert (str(two.plan), dict(two.ranks)) == ("tp=2,pp=2", {"b": 4})
    assert str(one.plan) == "tp=2,pp=2"
    assert spread(hosts[2:]) is None, "four processes do not fit two slots"


def test_a_dp_that_the_plans_rules_refuse_is_not_chosen() -> None:
    hosts = [Host("a", 3), Host("b", 3)]
    stages = limits("pp=2,microbatches=2", batch_size=8).allocate(hosts)
    assert stages is not None and stages.plan.dp == 2, "dp=3 does not divide the batch into equal pieces"
    sharded = limits("zero=3,shards=4").allocate(hosts)
    assert sharded is not None and sharded.plan.dp == 4
    assert limits("batch_shares=1+2+3+4").allocate(hosts[:1]) is None


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_processes_fill_hosts_in_order(slots: list[int], data: Any) -> None:
    hosts = [Host(f"h{number}", count) for number, count in enumerate(slots)]
    processes = data.draw(st.integers(1, sum(slots)))
    placed = fill(hosts, processes)
    assert sum(placed.values()) == processes
    used = [placed.get(host.name, 0) for host in hosts]
    assert all(used[i] == slots[i] for i in range(len(hosts)) if any(used[i + 1 :]))


def test_a_host_that_does_not_see_the_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.pretrain.hosts.member.FOLDER_SECONDS", 0.0)
    token = tmp_path / ".host-token"
    assert "is not there on this host: all hosts must see the folder" in _folder_problem(token, "abc")
    token.write_text("another")
    assert "holds something else" in _folder_problem(token, "abc")
    token.write_text("abc")
    assert not _folder_problem(token, "abc")


def test_a_store_listens_at_its_address_only() -> None:
    assert interfaces.of("127.0.0.1") == "lo"
    assert interfaces.of("192.0.2.77") is None
    served = store.listen("127.0.0.1")
    socket.create_connection(("127.0.0.1", served.port)).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", served.port), timeout=5)


def sockets_of(plan: str) -> dict[str, int]:
    """In one process: sockets and process groups, after each group has been used."""
    with world.join(plans.parse(plan)) as here:
        for axis in ("pp", "dp", "tp", "data", "fsdp"):
            if here.size(axis) > 1:
                dist.all_reduce(torch.ones(1), group=here.group(axis))
        dist.all_reduce(torch.ones(1))
        files = Path("/proc/self/fd")
        found = sum(file.is_socket() for file in files.iterdir())
        groups = len(dist.distributed_c10d._world.pg_map)
        dist.all_reduce(torch.ones(1))
        return {"sockets": found, "groups": groups}


@pytest.mark.slow
def test_processes_connect_only_along_the_axes_of_the_plan() -> None:
    few, many = ranks.run(3, f"{__name__}:sockets_of", "dp=3"), ranks.run(6, f"{__name__}:sockets_of", "dp=6")
    assert max(rank["sockets"] for rank in many) == max(rank["sockets"] for rank in few), (
        "a ring, no full mesh"
    )
    assert {rank["groups"] for rank in many} == {2}, "all, and each process alone"
    mixed = ranks.run(4, f"{__name__}:sockets_of", "dp=2,tp=2")
    assert {rank["groups"] for rank in mixed} == {4}, "all, dp, tp, and each process alone"
