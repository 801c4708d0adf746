"""The daemon as a process: its parts put together, its signals, its end.

SIGTERM and SIGINT end it, exit code 0: the training process stops, the task stays in hand for a restart.
SIGUSR1 and SIGHUP have it look again at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

import sdnotify

from edge_client import datasets, eligibility
from edge_client.agent import Agent, Surroundings, Wake, message_of
from edge_client.config import EdgeConfig
from edge_client.execute import Executor
from edge_client.ledger import Ledger
from edge_client.outbox import Outbox
from edge_client.state import State
from edge_client.train.process import TrainingProcess
from edge_client.train.resolve import installed_models, installed_runtimes
from edge_client.wire.device import CheckIn


def run(config: EdgeConfig) -> None:
    """Works until a signal ends it. Whoever calls holds the lock of the state folder.

    Raises:
        UserMistake: not enrolled. Stopped: the coordinator takes this device no more.
    """
    state = State(config.state_dir)
    wake = Wake()
    agent = Agent(_executor(config, state), surroundings(config, sdnotify.SystemdNotifier().notify), wake)

    def end(number: int, frame: FrameType | None) -> None:
        agent.end()

    def look(number: int, frame: FrameType | None) -> None:
        wake.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGUSR1, look)
    signal.signal(signal.SIGHUP, look)
    try:
        agent.run()
    finally:
        state.close()


def surroundings(config: EdgeConfig, notify: Callable[[str], None]) -> Surroundings:
    """What this machine has and senses."""
    found = installed_runtimes()
    return Surroundings(
        ineligible=lambda: eligibility.ineligible(
            config.conditions, eligibility.read_now(config.conditions, config.state_dir)
        ),
        datasets=datasets.RowCounts(config.data, time.monotonic),
        runtimes={name: found[name] for name in config.runtimes if name in found},
        models=installed_models(),
        notify=notify,
    )


def checkin_now(config: EdgeConfig, state: State) -> CheckIn:
    """The check-in this device would send now."""
    return message_of(config, state, surroundings(config, lambda message: None))


def wipe(config: EdgeConfig) -> None:
    """Removes all files of runs."""
    state = State(config.state_dir)
    try:
        _executor(config, state).wipe()
    finally:
        state.close()


def _executor(config: EdgeConfig, state: State) -> Executor:
    training = TrainingProcess(config.state_dir / "training.log", config.limits)
    return Executor(config, state, Outbox(state, config.outbox_bytes), Ledger(state), training)
