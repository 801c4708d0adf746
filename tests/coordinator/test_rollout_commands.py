"""`fedloop rollout` against a real operator API."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from coordinator.accounts.admin_token import TOKEN_FILE, ensure_admin_token
from coordinator.commands.rollout import app
from coordinator.errors import UserError
from coordinator.rollouts import controller
from coordinator.rollouts.gates import Gates
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from tests.support.device_world import World, serving, sqlite
from tests.support.doorway import listening
from tests.support.rollout_devices import MemoryReleases, RolloutDevice

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Console:
    """A coordinator with two devices that run digits:1, and the command line."""

    def __init__(self, world: World, releases: MemoryReleases) -> None:
        self.world = world
        self.releases = releases
        self.devices = [
            RolloutDevice(world.enrol(name), releases, active=("earlier", 1), accuracy={3: 0.2})
            for name in ("ada", "bob")
        ]
        for device in self.devices:
            device.check_in()

    def __call__(self, *args: str) -> str:
        """The output of the command; a user's mistake is raised as an exception."""
        done = CliRunner().invoke(app, list(args))
        if isinstance(done.exception, UserError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.turn()
            for device in self.devices:
                device.check_in()
        self.turn()

    def turn(self) -> None:
        controller.reconcile(self.world.services, self.releases)


@pytest.fixture
def fedloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    ensure_admin_token(tmp_path)
    with capture_logs(), sqlite(tmp_path) as database, serving(tmp_path, database) as world:
        releases = MemoryReleases(("digits", 1), ("digits", 2), ("digits", 3))
        world.services.opened.__dict__["releases"] = releases
        operator = operator_app(world.services, Any, Metrics(database, world.services.signals))  # type: ignore[arg-type]
        with listening(operator) as port:
            monkeypatch.setenv("FEDLOOP_COORDINATOR", f"http://127.0.0.1:{port}")
            monkeypatch.setenv("FEDLOOP_ADMIN_TOKEN", (tmp_path / TOKEN_FILE).read_text().strip())
            yield Console(world, releases)


def test_a_rollout_is_started_shown_and_listed(fedloop: Console) -> None:
    assert "no rollouts" in fedloop("list")
    assert "digits:2" in fedloop("start", "digits:2", "--phases", "50,100", "--gate", "install=0.9")
    assert "no device gets it yet" in fedloop("show", "digits")
    fedloop.turn()
    assert "waits: 0 of 1 devices have answered" in fedloop("show", "digits")
    fedloop.rounds(4)
    shown = fedloop("show", "digits")
    assert "finished since" in shown and shown.count("passed: 1 active; golden accuracy 0.9000") == 2
    assert "champion 0.9000 over 40 labels" in shown
    found = json.loads(fedloop("list", "--json"))
    assert [(each["state"], each["gates"]["install"]) for each in found] == [("finished", 0.9)]
    assert found[0]["id"][:8] in fedloop("list", "--model", "digits")
    assert json.loads(fedloop("show", found[0]["id"][:6], "--json"))["phases"][1]["active"] == 1


def test_a_halted_rollout_says_why(fedloop: Console) -> None:
    fedloop("start", "digits:3", "--phases", "50,100")
    fedloop.rounds(6)
    shown = fedloop("show", "digits")
    assert "rolled_back since" in shown and "accuracy is 0.2000, the champion's 0.9000" in shown
    assert "phase 1, 50 %, open: 1 rolled back" in shown and "phase 2, 100 %, to come: 1 waiting" in shown


def test_a_failed_device_is_shown_with_its_message_and_forced(fedloop: Console) -> None:
    ada = fedloop.devices[0]
    ada.broken = frozenset({2})
    fedloop("start", "digits:2", "--phases", "100", "--gate", "install=0.5")
    fedloop.rounds(3)
    assert "self_test: 1 device, such as ada: golden answers differ" in fedloop("show", "digits")
    ada.broken = frozenset()
    assert "tries again" in fedloop("force", "the ada")
    fedloop.rounds(2)
    assert ada.version == 2
    with pytest.raises(UserError, match="did not fail"):
        fedloop("force", "ada", "--rollout", "digits")


def test_a_rollout_is_paused_resumed_and_aborted(fedloop: Console) -> None:
    fedloop("start", "digits:2", "--filter", "group=default", "--filter", "runtime=litert")
    assert "is paused" in fedloop("pause", "digits")
    assert "is resumed" in fedloop("resume", "digits")
    fedloop.rounds(2)
    assert "is aborted" in fedloop("abort", "digits")
    fedloop.rounds(2)
    assert {device.version for device in fedloop.devices} == {1}
    with pytest.raises(UserError, match=r"cannot resume rollout .*: it is aborted"):
        fedloop("resume", "digits")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["digits"], "expected a model and a version"),
        (["digits:0"], "expected a model and a version"),
        (["digits:9"], "digits:9 is not published"),
        (["digits:2", "--phases", "10,5"], "increasing percentages"),
        (["digits:2", "--phases", "10,x"], "expected percentages"),
        (["digits:2", "--phases", "10,nan"], "expected percentages"),
        (["digits:2", "--gate", "confidence=inf"], "expected a number"),
        (["digits:2", "--filter", "color=red"], "one of group, class, runtime, id or label.KEY"),
        (["digits:2", "--filter", "group=nobody"], "no device matches"),
        (["digits:2", "--gate", "instal=1"], "did you mean 'install'"),
        (["digits:2", "--gate", "install=most"], "expected a number"),
        (["digits:2", "--gate", "min_answers=1.5"], "expected an integer"),
        (["digits:2", "--gate", "install=2"], "gate install = 2: expected 0 to 1"),
    ],
)
def test_an_invalid_rollout_is_refused(fedloop: Console, args: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fedloop("start", *args)


def test_a_rollout_of_a_model_of_quantities_compares_no_accuracy(fedloop: Console) -> None:
    fedloop.releases.tasks["digits", 2] = "regression"
    with pytest.raises(UserError, match="predicts a quantity, which has no accuracy"):
        fedloop("start", "digits:2")
    fedloop("start", "digits:2", "--gate", "max_accuracy_drop=none", "--gate", "max_loss_increase=1")
    assert "digits:2" in fedloop("list")


def test_the_guide_runs_as_written(fedloop: Console) -> None:
    """Its commands, one after the other, in a clinic with two devices of which one failed with the release before."""
    fedloop.releases.released.append(("digits", 4))
    for name in ("gateway-6", "gateway-7"):
        client = fedloop.world.enrol(name, name=name, device_group="clinic")
        broken = frozenset({4} if name == "gateway-7" else ())
        fedloop.devices.append(RolloutDevice(client, fedloop.releases, broken=broken))
        fedloop.devices[-1].check_in()
    fedloop("start", "digits:4", "--filter", "id=gateway-7")
    fedloop.rounds(2)
    page = (ROOT / "docs" / "rollouts.md").read_text("utf-8")
    commands = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).splitlines()
    verbs = {"start", "list", "show", "pause", "resume", "abort", "force"}
    assert {shlex.split(command)[2] for command in commands} == verbs
    for command in commands:
        program, group, *args = shlex.split(command)
        assert (program, group) == ("fedloop", "rollout")
        fedloop(*args)
        fedloop.turn()


def test_the_guide_shows_every_gate_with_its_default() -> None:
    page = (ROOT / "docs" / "rollouts.md").read_text("utf-8")
    shown = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", page, re.MULTILINE))
    expected = {each.name: "none" if each.default is None else f"{each.default:g}" for each in fields(Gates)}
    assert shown == expected


def test_an_unknown_rollout_is_refused(fedloop: Console) -> None:
    for verb in ("show", "pause", "resume", "abort"):
        with pytest.raises(UserError, match="no rollout matches 'cats'"):
            fedloop(verb, "cats")
