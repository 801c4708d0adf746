"""The device's environment: its clocks, data sets, runtimes and conditions, and what a check-in reports of them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edge_client.config import EdgeConfig
from edge_client.ota import slots, transitions
from edge_client.state import State
from edge_client.steps import Desired
from edge_client.train.interpreter import installed_kind
from edge_client.wire.device import WIRE, CheckIn, ReleaseReport


@dataclass(frozen=True)
class HostEnvironment:
    """What the daemon observes on its machine, including the clocks; a test supplies its own.

    Attributes:
        now: monotonic seconds. wall: seconds since 1970, may be wrong.
        ineligible: reasons why nothing may run now.
        datasets: logical name -> number of training rows, of readable data sets.
        runtimes: name -> version of allowed runtimes that work, in order of preference.
        notify: reports to the service manager. log: shows a line to whoever watches the daemon.
    """

    ineligible: Callable[[], tuple[str, ...]]
    datasets: Callable[[], Mapping[str, int]]
    runtimes: Mapping[str, str]
    models: tuple[str, ...]
    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    rng: random.Random = field(default_factory=random.SystemRandom)
    notify: Callable[[str], None] = lambda message: None
    log: Callable[[str], None] = lambda line: None


def read_desired(config: EdgeConfig, state: State, host: HostEnvironment) -> Desired:
    """The state that the owner and the machine's conditions ask for now."""
    paused = state.paused()
    reasons = (("paused by hand",) if paused else ()) + host.ineligible()
    opted_out = tuple(sorted({*config.opt_out, *state.opted_out()}))
    return Desired(
        paused,
        reasons,
        opted_out,
        reports_statistics=config.statistics.allowed,
        masks_updates=config.require_secure_aggregation,
        requires_noise=config.require_noise,
    )


def checkin_message(config: EdgeConfig, state: State, host: HostEnvironment) -> CheckIn:
    """Everything that a check-in reports about this device; nothing else reports anything."""
    desired = read_desired(config, state, host)
    return CheckIn(
        wire=f"{WIRE[0]}.{WIRE[1]}",
        software=software_version(),
        runtimes=dict(host.runtimes),
        memory_bytes=config.memory_bytes,
        device_class=config.device_class,
        labels=dict(config.labels),
        datasets=dict(host.datasets()),
        models=host.models,
        ineligible=desired.ineligible,
        opted_out=desired.opted_out,
        releases=release_reports(config.state_dir),
        release_runtime=installed_kind() or "",
    )


def release_reports(state_dir: Path) -> tuple[ReleaseReport, ...]:
    """The state of every model, for a check-in."""
    pointers = (slots.read(state_dir, model) for model in slots.models(state_dir))
    return tuple(report for pointer in pointers for report in transitions.reports(pointer))


def software_version() -> str:
    try:
        return version("fedloop")
    except PackageNotFoundError:
        return "unknown"


def log_line(line: str) -> None:
    """Writes a line to standard error, which may be closed: a daemon outlives the terminal it was started from."""
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
