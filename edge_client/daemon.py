"""The daemon as a process: its parts put together, its signals, its end.

SIGTERM and SIGINT end it at once, exit code 0, whatever it waits for: the training process stops, the task stays in
hand for a restart. A SIGKILL would do no harm anywhere, so nothing needs to be waited for.
SIGUSR1 and SIGHUP have it look again at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

import sdnotify

from edge_client import datasets, eligibility
from edge_client.agent import Agent
from edge_client.config import EdgeConfig
from edge_client.execute import Executor
from edge_client.ledger import Ledger
from edge_client.outbox import Outbox
from edge_client.state import State
from edge_client.surroundings import Surroundings, message_of
from edge_client.train.process import TrainingProcess
from edge_client.train.resolve import installed_models, installed_runtimes
from edge_client.wake import Ending, Wake
from edge_client.wire.device import CheckIn


def run(config: EdgeConfig) -> None:
    """Works until a signal ends it. Whoever calls holds the lock of the state folder.

    Raises:
        UserMistake: not enrolled. Stopped: the coordinator takes this device no more.
    """
    state = State(config.state_dir)
    wake = Wake()
    around = surroundings(config, sdnotify.SystemdNotifier().notify, changed=wake.set)
    agent = Agent(_executor(config, state), around, wake)

    def end(number: int, frame: FrameType | None) -> None:
        if not agent.is_ending:
            agent.end()
            raise Ending

    def look(number: int, frame: FrameType | None) -> None:
        wake.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGUSR1, look)
    signal.signal(signal.SIGHUP, look)
    try:
        agent.run()
    except Ending:
        pass  # before it began, or while it was ending for another reason
    finally:
        state.close()


def surroundings(
    config: EdgeConfig, notify: Callable[[str], None], changed: Callable[[], None] = lambda: None
) -> Surroundings:
    """What this machine has and senses."""
    found = installed_runtimes()
    return Surroundings(
        ineligible=lambda: eligibility.ineligible(
            config.conditions, eligibility.read_now(config.conditions, config.state_dir)
        ),
        datasets=datasets.RowCounts(
            config.data, time.monotonic, memory_bytes=config.limits.memory_bytes, changed=changed
        ),
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
