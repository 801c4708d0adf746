"""The daemon as a sandboxed systemd service: the unit's text and its installation.

The system service runs as its own user, allocated by systemd (`DynamicUser`), sees the file system read-only except
for its state folder, and is restarted unless a person must act first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from edge_client.config import EdgeConfig
from edge_client.errors import UserError
from edge_client.files import write_durably

Scope = Literal["user", "system"]

UNIT = "fedloop-edge.service"
REFUSED_EXIT = 77
"""Exit code if the coordinator no longer accepts this device; systemd does not restart it."""

_COMMON = """\
# Made by `fedloop-edge install-service`; changes of your own belong into `systemctl {flag}edit fedloop-edge`.
[Unit]
Description=Fedloop edge client
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
Environment={state_variable}
Environment=PYTHONDONTWRITEBYTECODE=1
WatchdogSec=300
Restart=always
RestartSec=10
RestartPreventExitStatus=2 {refused}
TimeoutStopSec=30
KillMode=mixed
Nice=10
IOSchedulingClass=idle
CPUQuota={cpu_percent}%
MemoryMax={memory_bytes}
TasksMax=256
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @obsolete
SystemCallErrorNumber=EPERM
"""

_SYSTEM = """\
DynamicUser=yes
StateDirectory={state_name}
StateDirectoryMode=0700
ReadWritePaths={state_dir}
ProtectSystem=strict
ProtectHome=read-only
ProtectProc=invisible
ProcSubset=all
PrivateTmp=yes
PrivateDevices=yes
PrivateUsers=yes
PrivateMounts=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RemoveIPC=yes
CapabilityBoundingSet=
AmbientCapabilities=

[Install]
WantedBy=multi-user.target
"""

_USER = """\

[Install]
WantedBy=default.target
"""

_DAEMON_BYTES = 256 * 1024 * 1024


def unit(scope: Scope, config: EdgeConfig, config_file: Path | None, sets: Sequence[str] = ()) -> str:
    """The unit's text. `config_file` and `sets`: the sources of `config`, passed on to the daemon.

    Raises:
        UserError: the system service cannot keep its state, or read its configuration, in the configured place.
    """
    state_dir = config.state_dir
    if scope == "system" and state_dir.parent != Path("/var/lib"):
        raise UserError(
            f"state_dir is {state_dir}; the machine's service keeps its state in a folder right in /var/lib, which "
            'systemd makes for its user: leave it out, or set state_dir = "/var/lib/NAME"'
        )
    if scope == "system" and config_file is not None and _is_in_home(config_file.absolute()):
        raise UserError(
            f"the configuration is {config_file}, in a person's home; the machine's service runs as a user of its own: "
            "move it, for instance to /etc/fedloop/edge.toml, and name it by --config"
        )
    text = _COMMON + (_SYSTEM if scope == "system" else _USER)
    return text.format(
        flag="--user " if scope == "user" else "",
        command=_command(config_file, sets),
        state_variable=_quote(f"FEDLOOP_EDGE_STATE_DIR={state_dir}"),
        state_dir=_quote(str(state_dir)),
        state_name=state_dir.name,
        refused=REFUSED_EXIT,
        cpu_percent=100 * (os.cpu_count() or 1),
        memory_bytes=(config.limits.memory_bytes or 0) + _DAEMON_BYTES
        if config.limits.memory_bytes
        else "infinity",
    )


def install(scope: Scope, text: str) -> Path:
    """Writes the unit and reloads systemd. Returns the unit's path.

    Raises:
        UserError: writing is not allowed, or systemd fails.
    """
    path = _folder(scope) / UNIT
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text.encode(), mode=0o644)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; --system needs root, --user does not"
        ) from None
    command = ["systemctl", *(["--user"] if scope == "user" else []), "daemon-reload"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise UserError(f"{path} was written, but there is no systemctl on this machine to read it") from None
    if done.returncode != 0:
        raise UserError(f"{path} was written, but `{' '.join(command)}` failed: {done.stderr.strip()}")
    return path


def _folder(scope: Scope) -> Path:
    if scope == "system":
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def _is_in_home(file: Path) -> bool:
    return Path.home() != Path("/") and file.is_relative_to(Path.home())


def _command(config_file: Path | None, sets: Sequence[str]) -> str:
    arguments = [str(Path(sys.executable).with_name("fedloop-edge"))]
    if config_file is not None:
        arguments += ["--config", str(config_file.absolute())]
    for each in sets:
        arguments += ["--set", each]
    return " ".join(_quote(each).replace("$", "$$") for each in [*arguments, "run"])


def _quote(word: str) -> str:
    """Quotes an argument for systemd: doubles specifiers, quotes all but plain characters."""
    escaped = word.replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"')
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", word) else f'"{escaped}"'
