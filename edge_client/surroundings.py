"""What a device has, senses and wants, and all that a check-in tells of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from edge_client.config import EdgeConfig
from edge_client.ota import releases
from edge_client.state import State
from edge_client.steps import Desired
from edge_client.wire.device import WIRE, CheckIn


@dataclass(frozen=True)
class Surroundings:
    """What the daemon senses, and how time passes; a test gives its own.

    Attributes:
        now: seconds, never jumps. wall: seconds since 1970, may be wrong.
        ineligible: why nothing may run now, in words.
        datasets: logical name -> training rows of those that can be read.
        runtimes: name -> version of those that work and are allowed, in order of preference.
    """

    ineligible: Callable[[], tuple[str, ...]]
    datasets: Callable[[], Mapping[str, int]]
    runtimes: Mapping[str, str]
    models: tuple[str, ...]
    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    rng: random.Random = field(default_factory=random.SystemRandom)
    notify: Callable[[str], None] = lambda message: None


def desired_by(config: EdgeConfig, state: State, around: Surroundings) -> Desired:
    """What the person and the machine's conditions want now."""
    paused = state.paused()
    reasons = (("paused by hand",) if paused else ()) + around.ineligible()
    return Desired(paused, reasons, tuple(sorted({*config.opt_out, *state.opted_out()})))


def message_of(config: EdgeConfig, state: State, around: Surroundings) -> CheckIn:
    """All that a check-in tells about this device; there is no other place where it tells anything."""
    desired = desired_by(config, state, around)
    return CheckIn(
        wire=f"{WIRE[0]}.{WIRE[1]}",
        software=software_version(),
        runtimes=dict(around.runtimes),
        memory_bytes=config.limits.memory_bytes or 0,
        device_class=config.device_class,
        labels=dict(config.labels),
        datasets=dict(around.datasets()),
        models=around.models,
        ineligible=desired.ineligible,
        opted_out=desired.opted_out,
        releases=releases.reports(config.state_dir),
    )


def software_version() -> str:
    try:
        return version("fedloop")
    except PackageNotFoundError:
        return "unknown"
