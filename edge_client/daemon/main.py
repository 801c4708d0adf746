"""The daemon process: assembles the parts and handles signals.

SIGTERM and SIGINT end it at once with exit code 0, whatever it waits for: the training process stops, and the daemon
keeps the task for a restart. Not even a SIGKILL does harm, so there is nothing to wait for.
SIGUSR1 and SIGHUP wake it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing
from types import FrameType

import sdnotify

from edge_client import eligibility
from edge_client.config import EdgeConfig
from edge_client.daemon.agent import Agent
from edge_client.daemon.executor import Executor
from edge_client.daemon.heartbeat import ShutdownRequested, WakeupPipe
from edge_client.daemon.host_environment import HostEnvironment, checkin_message, log_line
from edge_client.data import preview
from edge_client.outbox import Ledger, Outbox
from edge_client.state import State
from edge_client.train.process import TrainingProcess
from edge_client.train.resolve import installed_models, installed_runtimes
from edge_client.wire.device import CheckIn


def run(config: EdgeConfig) -> None:
    """Works until a signal ends it. The caller holds the lock of the state folder.

    Raises:
        UserError: not enrolled. Stopped: the coordinator no longer accepts this device.
    """
    state = State(config.state_dir)
    wakeup = WakeupPipe()
    host = host_environment(config, sdnotify.SystemdNotifier().notify, changed=wakeup.set, log=log_line)
    agent = Agent(_executor(config, state), host, wakeup)

    def end(number: int, frame: FrameType | None) -> None:
        if not agent.is_ending:
            agent.end()
            raise ShutdownRequested

    def wake(number: int, frame: FrameType | None) -> None:
        wakeup.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGUSR1, wake)
    signal.signal(signal.SIGHUP, wake)
    try:
        agent.run()
    except ShutdownRequested:
        pass  # before it began, or while it was ending for another reason
    finally:
        state.close()


def host_environment(
    config: EdgeConfig,
    notify: Callable[[str], None],
    changed: Callable[[], None] = lambda: None,
    log: Callable[[str], None] = lambda line: None,
) -> HostEnvironment:
    """The environment of this machine."""
    installed = installed_runtimes()
    return HostEnvironment(
        ineligible=lambda: eligibility.ineligible(
            config.conditions, eligibility.read_now(config.conditions, config.state_dir)
        ),
        datasets=preview.RowCounts(
            config.data, time.monotonic, memory_bytes=config.limits.memory_bytes, changed=changed
        ),
        runtimes={name: installed[name] for name in config.runtimes if name in installed},
        models=installed_models(),
        notify=notify,
        log=log,
    )


def checkin_now(config: EdgeConfig, state: State) -> CheckIn:
    """The check-in this device would send now."""
    return checkin_message(config, state, host_environment(config, lambda message: None))


def wipe(config: EdgeConfig) -> None:
    """Removes all files of runs."""
    with closing(State(config.state_dir)) as state:
        _executor(config, state).wipe()


def _executor(config: EdgeConfig, state: State) -> Executor:
    training = TrainingProcess(config.state_dir / "training.log", config.limits)
    return Executor(config, state, Outbox(state, config.outbox_bytes), Ledger(state), training)
