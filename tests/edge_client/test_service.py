"""The systemd unit, judged by systemd itself where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edge_client import config
from edge_client.commands import systemd_unit
from edge_client.errors import UserError

LOOSEST_EXPOSURE = 3.0
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def unit(scope: systemd_unit.Scope, folder: Path) -> Path:
    loaded = config.load(
        None, {}, ["state_dir=/var/lib/fedloop-edge", "limits.memory_bytes=500000000"]
    ).config
    path = folder / systemd_unit.UNIT
    path.write_text(systemd_unit.unit(scope, loaded, Path("/etc/fedloop/edge.toml")))
    return path


@analyze
def test_the_machines_service_is_well_sandboxed(tmp_path: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit("system", tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= LOOSEST_EXPOSURE, done.stdout


@analyze
@pytest.mark.parametrize("scope", ["user", "system"])
def test_systemd_understands_the_unit(tmp_path: Path, scope: systemd_unit.Scope) -> None:
    command = [
        "systemd-analyze",
        "verify",
        "--man=no",
        *(["--user"] if scope == "user" else []),
        str(unit(scope, tmp_path)),
    ]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "fedloop-edge" in line]
    assert ours == [] and done.returncode == 0, done.stderr


def test_the_machines_state_lies_where_systemd_makes_it(tmp_path: Path) -> None:
    loaded = config.load(None, {}, [f"state_dir={tmp_path}"]).config
    with pytest.raises(UserError, match="/var/lib"):
        systemd_unit.unit("system", loaded, None)
    assert str(tmp_path) in systemd_unit.unit("user", loaded, None)


def test_the_unit_keeps_the_flags_and_odd_paths(tmp_path: Path) -> None:
    state = tmp_path / "a state 100%"
    sets = [f"state_dir={state}", 'labels.site=ber"lin $HOME']
    loaded = config.load(None, {}, sets).config
    text = systemd_unit.unit("user", loaded, None, sets)
    assert f'Environment="FEDLOOP_EDGE_STATE_DIR={tmp_path}/a state 100%%"' in text
    assert '--set "labels.site=ber\\"lin $$HOME" run' in text


def test_a_configuration_in_a_persons_home_is_none_of_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = config.load(None, {}, ["state_dir=/var/lib/fedloop-edge"]).config
    with pytest.raises(UserError, match=r"/etc/fedloop/edge\.toml"):
        systemd_unit.unit("system", loaded, tmp_path / "edge.toml")


def test_the_unit_says_what_the_daemon_needs(tmp_path: Path) -> None:
    text = unit("system", tmp_path).read_text()
    for words in (
        "Type=notify",
        "WatchdogSec=",
        "ProtectSystem=strict",
        "ReadWritePaths=/var/lib/fedloop-edge",
        "DynamicUser=yes",
        "MemoryMax=768435456",
        "--config /etc/fedloop/edge.toml run",
        f"RestartPreventExitStatus=2 {systemd_unit.REFUSED_EXIT}",
    ):
        assert words in text, words
