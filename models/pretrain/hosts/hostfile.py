"""The hosts of a training: one a line, in the form that users of mpirun know, or as Slurm allocated them.

    # name       options
    node1        slots=4
    node2        slots=4 address=10.0.0.2

`slots` is the number of processes on the host, 1 by default; `address`, the one that the other hosts reach it at, is by
default what its name resolves to.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from models.options import bounded
from models.pretrain.plan import Sizes

MAX_SLOTS = 1024

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 {host}"
"""Default remote shell. It never asks for a password, and notices a dead connection."""

SRUN = "srun --overlap --quiet --nodes=1 --ntasks=1 --cpu-bind=none --nodelist={host}"
"""Default remote shell in a Slurm job: a job step on that node."""

_NAME = re.compile(r"[A-Za-z0-9_.@:%\[\]-]+")
_SHELL_SAFE = re.compile(r"[A-Za-z0-9_./+@%=:,-]+")


class HostsError(ValueError):
    """Hosts that cannot be used; the message names the line and says what was expected."""


@dataclass(frozen=True)
class Host:
    """A host: its `name` for the remote shell, its number of processes, and its address for the other hosts."""

    name: str
    slots: int = bounded(1, 1, MAX_SLOTS)
    address: str = ""


@dataclass(frozen=True)
class HostSettings:
    """The `hosts` table of a job file.

    Attributes:
        hosts: in the order in which they are filled.
        processes: how many train together when all hosts are there.
        remote_shell: command that runs another on a host; {host} stands for its name.
        python: interpreter on the hosts.
        sizes: of the model, which limit plans with fewer processes.
    """

    hosts: tuple[Host, ...]
    processes: int
    remote_shell: str = SSH
    python: str = ""
    sizes: Sizes = Sizes()  # noqa: RUF009 - frozen


def parse(text: str, source: str) -> list[Host]:
    """The hosts in a file of this content; `source` names it in messages.

    Raises:
        HostsError: naming every bad line.
    """
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
            if host.name in hosts:
                raise HostsError(f"{host.name} is named twice; give all its slots in one line")
            hosts[host.name] = host
        except HostsError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        raise HostsError(
            "\n  ".join([f"{source}:", *problems]) if problems[1:] else f"{source}: {problems[0]}"
        )
    if not hosts:
        raise HostsError(f"{source}: there is no host in it; expected lines such as: node1 slots=4")
    return list(hosts.values())


def _host(words: Sequence[str]) -> Host:
    name, *rest = words
    if not _NAME.fullmatch(name) or name.startswith("-"):
        raise HostsError(f"{name!r} is no host name; expected a line such as: node1 slots=4")
    values: dict[str, str] = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if key not in ("slots", "address") or not equals or not value:
            raise HostsError(f"{word!r} after {name}: expected slots=N or address=IP")
        if key in values:
            raise HostsError(f"{key} is given twice for {name}")
        values[key] = value
    slots = values.get("slots", "1")
    if not slots.isdecimal() or not 1 <= int(slots) <= MAX_SLOTS:
        raise HostsError(f"slots={slots} of {name}: expected a whole number from 1 to {MAX_SLOTS}")
    return Host(name, int(slots), values.get("address", ""))


def from_slurm(environment: Mapping[str, str]) -> list[Host]:
    """The nodes and tasks that Slurm allocated to the job whose environment this is.

    Raises:
        HostsError: it is not that of a Slurm job, or cannot be read.
    """
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "")
    if not nodes:
        raise HostsError(
            "--hosts slurm: SLURM_JOB_NODELIST is not set; start the command in a Slurm job (sbatch or salloc)"
        )
    names = list(expand(nodes))
    tasks = environment.get("SLURM_TASKS_PER_NODE", "1")
    counts = [count for part in tasks.split(",") for count in _repeated(part, tasks)]
    if len(counts) != len(names):
        raise HostsError(
            f"SLURM_TASKS_PER_NODE={tasks} counts {len(counts)} nodes, SLURM_JOB_NODELIST={nodes} has {len(names)}"
        )
    return [Host(name, count) for name, count in zip(names, counts, strict=True)]


def _repeated(part: str, source: str) -> list[int]:
    """[4, 4] of "4(x2)"."""
    match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
    if match is None:
        raise HostsError(f"SLURM_TASKS_PER_NODE={source}: expected numbers such as 4(x2),3")
    return [int(match[1])] * int(match[2] or 1)


def expand(nodes: str) -> Iterator[str]:
    """The names in a Slurm host list, such as node[01-03,07],gpu1: `scontrol show hostnames` without Slurm.

    Raises:
        HostsError: it is none.
    """
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes):
        yield from _expand_ranges(part, nodes)


def _expand_ranges(part: str, source: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for each in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise HostsError(f"SLURM_JOB_NODELIST={source}: {each!r} is no range of numbers")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            yield from _expand_ranges(f"{before}{number:0{len(match[1])}}{after}", source)


def resolve(hosts: Sequence[Host]) -> list[Host]:
    """`hosts` with an IP address each.

    Raises:
        HostsError: a name cannot be resolved, or only to an address that other hosts cannot reach.
    """
    resolved = [replace(host, address=_address(host)) for host in hosts]
    loopback = [host for host in resolved if ipaddress.ip_address(host.address).is_loopback]
    if loopback and len(loopback) < len(resolved):
        host = loopback[0]
        raise HostsError(
            f"{host.name} has the address {host.address} here, which other hosts cannot reach; add address=IP to its line"
        )
    return resolved


def _address(host: Host) -> str:
    name = host.address or host.name.rpartition("@")[2]
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise HostsError(
            f"{name} has no IPv4 address here ({error.strerror or error}); add address=IP to the line of {host.name}"
        ) from None
    return str(found[0][4][0])


def remote_command(settings: HostSettings, host: Host, *arguments: str) -> list[str]:
    """The command that starts Python with `arguments` on `host`.

    Remote shells either pass words on, or join them for the shell on the host, so no word may mean anything to a shell.

    Raises:
        HostsError: one does.
    """
    python = [settings.python, "-P", *arguments]
    for word in python:
        require_safe(word)
    if host.name == "localhost":
        return python
    shell = [word.replace("{host}", host.name) for word in settings.remote_shell.split()]
    return shell + python


def require_safe(word: str) -> None:
    """Raises: HostsError: the word may mean something to a shell."""
    if not _SHELL_SAFE.fullmatch(word):
        raise HostsError(
            f"{word!r} has characters that a remote shell may interpret; name an interpreter without them by --remote-python"
        )


def check_remote_shell(shell: str) -> None:
    """Raises: HostsError: it does not say where the host's name goes."""
    if "{host}" not in shell:
        raise HostsError(
            f"--remote-shell {shell!r}: expected a command with {{host}} for the host's name, such as {SSH!r}"
        )
