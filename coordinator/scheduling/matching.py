"""Matching: the reasons why a device cannot take part in a run. Without a reason, it can.

The same pure function selects devices and explains them in `fedloop device why`, so the two cannot disagree. It looks at
the device's row and its last report; what the device is doing right now concerns the round only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from coordinator.project_names import DEFAULT_PROJECT
from coordinator.scheduling.deployments import Deployment, class_for
from edge_client.wire.device import OLDEST_MINOR, WIRE, CheckIn, RuntimeName, TaskKind, supports

Code = Literal[
    "other_project",
    "pending",
    "revoked",
    "left",
    "certificate_expired",
    "never_seen",
    "not_seen",
    "missed_task",
    "wire_version",
    "ineligible",
    "opted_out",
    "group",
    "device_class",
    "labels",
    "memory",
    "no_dataset",
    "no_relay",
    "relay",
    "wrong_runtime",
    "no_model",
]

Presence = Literal["online", "late", "offline"]

OVERDUE_AFTER = timedelta(seconds=60)
"""How late a device may be for its next check-in before it counts as absent."""

MIN_WIRE_VERSION: dict[TaskKind, tuple[int, int]] = {
    "train": (1, 0),
    "evaluate": (1, 1),
    "statistics": (1, 4),
    "fold": (1, 4),
}
"""The wire version that introduced each kind of task."""
SCHEMAS_SINCE = (1, 4)
"""A device of before would read a table by its own configuration alone."""
CHANGED_STEPS_SINCE = (1, 4)
"""A device of before would train without momentum and clipping, and by SGD alone."""
CLIPPED_UPDATES_SINCE = (1, 4)
"""A device of before would send its update as long as it is."""
CODES_SINCE = (1, 4)
"""A device of before would send its update as it is, which the run refuses."""
MASKED_UPDATES_SINCE = (1, 4)
"""A device of before would send its update in the open."""
PERSONAL_MODELS_SINCE = (1, 4)
"""A device of before has no model of its own, and would score the global one."""
NARROWER_MODELS_SINCE = (1, 4)
"""A device of before would train a narrower model without what its outputs are divided by."""


@dataclass(frozen=True)
class Reason:
    """A stable code, and a message for people."""

    code: Code
    message: str


@dataclass(frozen=True)
class Candidate:
    """A device as its row describes it.

    Attributes:
        state: pending, active, revoked or left.
        expected_at: when its next check-in is due.
        report: its last check-in; None before the first.
        missed_at: when it declined a task, the coordinator gave up on one, or the round that it was working on ended, if it
            has not checked in since.
        relay: the relay that it belongs to.
        relay_names: of a relay, what its devices reach it at.
    """

    id: str
    name: str
    state: str
    group: str
    certificate_until: datetime | None
    last_seen_at: datetime | None
    expected_at: datetime | None
    report: CheckIn | None
    missed_at: datetime | None = None
    project: str = DEFAULT_PROJECT
    relay: str | None = None
    relay_names: Sequence[str] | None = None


def blocking_reasons(
    device: Candidate, deployment: Deployment, now: datetime, kind: TaskKind | None = None
) -> tuple[Reason, ...]:
    """All reasons why `device` gets no task of this run; empty if it may get one. `kind`: by default the deployment's."""
    kind = kind or deployment.kind
    if device.project != deployment.project:
        return (Reason("other_project", "it belongs to another project"),)
    absence = absence_reasons(device, now)
    if absence or device.report is None:
        return absence
    if device.relay_names is not None:
        return (Reason("relay", "it is a relay, which has no data of its own"),)
    return tuple(
        reason
        for reason in (
            _wire_reason(device.report, kind, deployment),
            *_device_refusals(device.report, deployment),
            *_selection_mismatches(device, device.report, deployment),
            _runtime_reason(device.report, deployment) if kind != "statistics" else None,
        )
        if reason is not None
    )


def absence_reasons(device: Candidate, now: datetime) -> tuple[Reason, ...]:
    """The reasons why the device gets no task of any run."""
    reason = _STATE_REASONS.get(device.state) or _absence(device, now)
    return (reason,) if reason is not None else ()


def _absence(device: Candidate, now: datetime) -> Reason | None:
    if device.certificate_until is not None and device.certificate_until <= now:
        until = f"{device.certificate_until:%Y-%m-%d %H:%M} UTC"
        message = f"its certificate expired on {until}; it renews by itself when it comes back"
        return Reason("certificate_expired", message)
    if device.report is None or device.last_seen_at is None:
        return Reason("never_seen", "it enrolled but never checked in; is `fedloop-edge run` running?")
    if presence(device.last_seen_at, device.expected_at, now) == "offline":
        since = f"{device.last_seen_at:%Y-%m-%d %H:%M:%S} UTC"
        age = _age(now - device.last_seen_at)
        return Reason("not_seen", f"it was last seen on {since}, {age} ago, and is overdue")
    if device.missed_at is not None:
        at = f"{device.missed_at:%Y-%m-%d %H:%M:%S} UTC"
        message = (
            f"its task was given up at {at} and it has not checked in since; it may be chosen once it does"
        )
        return Reason("missed_task", message)
    return None


def presence(last_seen_at: datetime | None, expected_at: datetime | None, now: datetime) -> Presence:
    """Whether a device is there, by its next expected check-in: offline if that is overdue or it never checked in."""
    if last_seen_at is None:
        return "offline"
    late = now - (expected_at or last_seen_at)
    return "offline" if late > OVERDUE_AFTER else "late" if late > timedelta() else "online"


def runtime_for(report: CheckIn, deployment: Deployment) -> RuntimeName | None:
    """The runtime this device uses for this run: the first allowed one that it has together with the model."""
    for runtime in deployment.runtimes:
        if runtime in report.runtimes and _has_model(report, deployment, runtime):
            return runtime
    return None


def has_opted_out(report: CheckIn, run: str, run_name: str) -> bool:
    """Whether the device's owner opted out of this run, by its id or its name."""
    return run in report.opted_out or run_name in report.opted_out


_STATE_REASONS = {
    "pending": Reason("pending", "its enrolment waits for approval: `fedloop device approve`"),
    "revoked": Reason("revoked", "it was revoked"),
    "left": Reason("left", "it left the federation"),
}


def _wire_reason(report: CheckIn, kind: TaskKind, deployment: Deployment) -> Reason | None:
    needs = [(MIN_WIRE_VERSION[kind], f"{kind} tasks")]
    if deployment.reads_by_schema:
        needs.append((SCHEMAS_SINCE, "tasks with a data schema"))
    if deployment.changes_steps and kind == "train":
        needs.append((CHANGED_STEPS_SINCE, "tasks with momentum, clipped gradients or AdamW"))
    if deployment.changes_updates and kind == "train":
        needs.append((CLIPPED_UPDATES_SINCE, "tasks whose updates are clipped or noised"))
    if deployment.has_code and kind == "train":
        needs.append((CODES_SINCE, "tasks with a code for updates"))
    if deployment.secure is not None and kind == "train":
        needs.append((MASKED_UPDATES_SINCE, "tasks with secure aggregation"))
    if deployment.personal_rule:
        needs.append((PERSONAL_MODELS_SINCE, "tasks with a model of the device's own"))
    if deployment.classes and kind != "statistics":
        needs.append((NARROWER_MODELS_SINCE, "tasks of a model class"))
    since, tasks = max(needs, key=lambda each: each[0])
    if supports(report.wire, since):
        return None
    needed = ".".join(map(str, max(since, (WIRE[0], OLDEST_MINOR))))
    return Reason(
        "wire_version",
        f"it speaks wire {report.wire}, {tasks} need {needed} up to {WIRE[0]}.x; update its software",
    )


def _device_refusals(report: CheckIn, deployment: Deployment) -> Iterator[Reason]:
    if report.ineligible:
        yield Reason("ineligible", f"ineligible: {'; '.join(report.ineligible)}")
    if has_opted_out(report, deployment.run, deployment.run_name):
        yield Reason("opted_out", "its owner opted out of this run")


def _selection_mismatches(device: Candidate, report: CheckIn, deployment: Deployment) -> Iterator[Reason]:
    wanted = deployment.selection
    if wanted.groups and device.group not in wanted.groups:
        yield Reason("group", f"it is in group {device.group!r}, the run wants {_any_of(wanted.groups)}")
    if wanted.device_classes and report.device_class not in wanted.device_classes:
        yield Reason(
            "device_class",
            f"its class is {report.device_class!r}, the run wants {_any_of(wanted.device_classes)}",
        )
    for key, value in sorted(wanted.labels.items()):
        if report.labels.get(key) != value:
            has = repr(report.labels[key]) if key in report.labels else "missing"
            yield Reason("labels", f"its label {key} is {has}, the run wants {value!r}")
    if report.memory_bytes < wanted.memory_bytes:
        yield Reason(
            "memory",
            f"it offers {_mib(report.memory_bytes)} of memory, the run wants {_mib(wanted.memory_bytes)}",
        )
    if deployment.classes and class_for(deployment.classes, report.memory_bytes) is None:
        least = min(each.memory_bytes for each in deployment.classes)
        yield Reason(
            "memory",
            f"it offers {_mib(report.memory_bytes)} of memory, and every model class of the run needs more, {_mib(least)} or above",
        )
    if deployment.relaying is not None and device.relay is None:
        yield Reason("no_relay", "it belongs to no relay, and updates of the run go through relays")
    if report.datasets.get(deployment.dataset, 0) < 1:
        missing = "has no rows" if deployment.dataset in report.datasets else "is not configured"
        yield Reason("no_dataset", f"dataset {deployment.dataset!r} {missing} on it")


def _runtime_reason(report: CheckIn, deployment: Deployment) -> Reason | None:
    if runtime_for(report, deployment) is not None:
        return None
    has = " and ".join(sorted(report.runtimes)) or "no runtime"
    if not set(report.runtimes) & set(deployment.runtimes):
        return Reason("wrong_runtime", f"it has {has}, the run wants {_any_of(deployment.runtimes)}")
    name = deployment.model.name
    return Reason("no_model", f"model {name!r} is not installed on it for {has}")


def _has_model(report: CheckIn, deployment: Deployment, runtime: RuntimeName) -> bool:
    """A task carries the model for the litert runtime; other runtimes build it from installed code."""
    if runtime == "litert":
        return deployment.artifact is not None and deployment.manifest is not None
    return deployment.model.name in report.models


def _any_of(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def _age(passed: timedelta) -> str:
    for length, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if passed.total_seconds() >= 2 * length:
            return f"{passed.total_seconds() / length:.0f} {unit}"
    return f"{passed.total_seconds():.0f} seconds"
