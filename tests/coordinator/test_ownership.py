"""Our names are generic: who else claims one is told before anything else goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import import_guard
from coordinator.import_guard import NAMES

HOME = Path(import_guard.__file__).resolve().parent.parent
FEDLOOP = Path(sys.executable).with_name("fedloop")


def test_in_this_checkout_all_names_are_ours() -> None:
    assert import_guard.problems() == []


def test_names_found_at_home_are_not_shadowed() -> None:
    home = Path("/opt/fedloop")
    assert import_guard.shadowed({name: home / name for name in NAMES}, home) == []


def test_a_shadowed_name_says_where_it_leads_and_what_to_do() -> None:
    home = Path("/opt/fedloop")
    found = {name: home / name for name in NAMES} | {"models": Path("/home/me/models")}
    assert import_guard.shadowed(found, home) == [
        "the name 'models' leads to /home/me/models, not to /opt/fedloop/models; rename or move that, or take "
        "its folder off PYTHONPATH"
    ]


def test_a_missing_package_says_how_to_install_it() -> None:
    (words,) = import_guard.shadowed({"strategies": None}, Path("/opt/fedloop"))
    assert "'strategies' is missing from /opt/fedloop" in words
    assert "pip install --force-reinstall fedloop" in words


def test_names_of_our_distribution_alone_are_not_contested() -> None:
    assert import_guard.contested({name: ["fedloop"] for name in NAMES} | {"numpy": ["numpy"]}) == []
    assert import_guard.contested({}) == []


def test_each_other_distribution_with_one_of_our_names_is_named() -> None:
    owners = {"models": ["fedloop", "zoo", "zoo", "nets"], "strategies": ["fedloop"], "utils": ["zoo"]}
    words = import_guard.contested(owners)
    assert len(words) == 2
    assert "the distribution 'nets' also installs a top-level package 'models'" in words[0]
    assert "pip uninstall zoo" in words[1]


@pytest.fixture
def shadow(tmp_path: Path) -> Path:
    """A folder with a package of the user's own, named like one of ours."""
    package = tmp_path / "models"
    package.mkdir()
    (package / "__init__.py").write_text("mine = True\n")
    return tmp_path


def run(*command: str | Path, shadow: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": str(shadow)},
        cwd=shadow,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def leads_astray(shadow: Path) -> str:
    return f"the name 'models' leads to {shadow / 'models'}, not to {HOME / 'models'}"


def test_doctor_names_the_shadow_and_exits_with_1(shadow: Path) -> None:
    done = run(FEDLOOP, "doctor", "--json", shadow=shadow)
    assert (done.returncode, done.stderr) == (1, "")
    errors = [finding for finding in json.loads(done.stdout) if finding["level"] == "error"]
    assert [finding["subject"] for finding in errors] == ["top-level names"]
    assert leads_astray(shadow) in errors[0]["words"]


def test_simulate_says_how_to_mend_it_and_exits_with_2(shadow: Path) -> None:
    done = run(FEDLOOP, "simulate", "--out", shadow / "out", shadow=shadow)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert leads_astray(shadow) in done.stderr
    assert "take its folder off PYTHONPATH" in done.stderr
    assert not (shadow / "out").exists()


def test_the_python_api_says_it_too(shadow: Path) -> None:
    done = run(sys.executable, "-c", "import fedloop", shadow=shadow)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: {leads_astray(shadow)}")


def test_a_folder_of_the_same_name_where_one_works_is_no_shadow(shadow: Path) -> None:
    """The command does not look into the working directory."""
    done = subprocess.run(
        [FEDLOOP, "doctor", "--json"], cwd=shadow, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", ["doctor", "simulate"])
def test_a_shadow_of_the_commands_own_package_is_reported_too(shadow: Path, command: str) -> None:
    (shadow / "models").rename(shadow / "coordinator")
    done = run(FEDLOOP, command, shadow=shadow)
    assert (done.returncode, done.stdout) == (2, "")
    leads = f"the name 'coordinator' leads to {shadow / 'coordinator'}, not to {HOME / 'coordinator'}"
    assert leads in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("listed", ["top_level.txt", "RECORD"])
def test_a_distribution_beside_ours_that_installs_one_of_our_names_is_found(
    tmp_path: Path, listed: str
) -> None:
    about = tmp_path / "zoo-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 1.0\n")
    (about / listed).write_text(
        "animals\nmodels\n" if listed == "top_level.txt" else "animals/models/a.py,,\nmodels/__init__.py,,\n"
    )
    done = run(FEDLOOP, "simulate", "--out", tmp_path / "out", shadow=tmp_path)
    assert done.returncode == 2
    assert "the distribution 'zoo' also installs a top-level package 'models'" in done.stderr
    assert "'strategies'" not in done.stderr
