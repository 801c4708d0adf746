"""Checks what could keep the daemon from working, each with a remedy."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from edge_client.clock import CLOCK_TOLERANCE_SECONDS, describe_clock_error
from edge_client.config import EdgeConfig
from edge_client.data import preview
from edge_client.errors import UserError
from edge_client.state import State, remedy
from edge_client.train.resolve import INSTALL_OPACUS, installed_runtimes
from edge_client.transport import identity
from edge_client.transport.failures import CertificateExpired, ServerRefused, Unreachable
from edge_client.transport.identity import Identity
from edge_client.transport.link import Link, pinned_context, unverified_date

_LITTLE_DISK_BYTES = 500_000_000
_ENROL_AGAIN = "fedloop-edge leave, then enroll again"
_RENEWED = "the daemon renews it by itself: fedloop-edge run"
_REPLACED = "an intermediary removes the certificate, or the coordinator was set up again"
_CERTIFICATE_REMEDIES = {
    "revoked": _ENROL_AGAIN,
    "unknown_device": _ENROL_AGAIN,
    "pending": "wait for it",
    "expired": _RENEWED,
    "not_yet_valid": _RENEWED,
    "no_certificate": _REPLACED,
    "foreign_certificate": _REPLACED,
}


@dataclass(frozen=True)
class Check:
    """The result of one check. `mend`: the remedy, if it failed."""

    name: str
    well: bool
    found: str
    mend: str = ""


def examine(config: EdgeConfig, wall: Callable[[], float] = time.time) -> Iterator[Check]:
    """Runs the checks one by one; skips those that depend on a failed one.

    `wall`: this machine's clock, seconds since 1970.
    """
    yield (folder := _state_folder(config))
    if not folder.well:
        return
    yield _disk(config)
    yield _runtimes(config)
    yield from _private_training(config)
    yield from _data(config)
    try:
        member = identity.load(config.state_dir)
    except UserError as error:
        yield Check("identity", False, str(error), _ENROL_AGAIN)
        return
    if member is None:
        yield Check("identity", False, "not enrolled", "fedloop-edge enroll URL TOKEN")
        return
    yield from _coordinator(config, member, wall)


def _state_folder(config: EdgeConfig) -> Check:
    try:
        State(config.state_dir).close()
    except UserError as error:
        return Check("state folder", False, str(error), "see above")
    except (sqlite3.Error, OSError) as error:
        return Check("state folder", False, f"{config.state_dir}: {error}", remedy(error))
    return Check("state folder", True, str(config.state_dir))


def _disk(config: EdgeConfig) -> Check:
    free = shutil.disk_usage(config.state_dir).free
    enough = free >= _LITTLE_DISK_BYTES
    return Check(
        "disk", enough, f"{free / 1e9:.1f} GB free", "" if enough else "make room, or move state_dir"
    )


def _runtimes(config: EdgeConfig) -> Check:
    installed = {name: text for name, text in installed_runtimes().items() if name in config.runtimes}
    if not installed:
        return Check(
            "runtimes",
            False,
            f"none of {', '.join(config.runtimes)} is installed",
            "pip install 'fedloop[edge]'",
        )
    return Check("runtimes", True, ", ".join(f"{name} {text}" for name, text in installed.items()))


def _private_training(config: EdgeConfig) -> Iterator[Check]:
    """Whether it can train by DP-SGD, if it trains in PyTorch. It is well without: such tasks are declined."""
    if "torch" not in config.runtimes or "torch" not in installed_runtimes():
        return
    try:
        found = f"opacus {version('opacus')}"
    except PackageNotFoundError:
        found = f"opacus is not installed, so tasks of DP-SGD are declined; {INSTALL_OPACUS}"
    yield Check("DP-SGD", True, found)


def _data(config: EdgeConfig) -> Iterator[Check]:
    if not config.data:
        yield Check(
            "data", False, "no data set is configured", "add a table [data.NAME] to the configuration"
        )
        return
    for name, found in preview.look(config.data, config.limits.memory_bytes).items():
        if isinstance(found, int):
            yield Check(f"data {name}", True, f"{found} rows")
        else:
            yield Check(f"data {name}", False, found, f"correct [data.{name}] in the configuration")


def _coordinator(config: EdgeConfig, member: Identity, wall: Callable[[], float]) -> Iterator[Check]:
    context = pinned_context(member.ca_pem, member.credentials)
    try:
        with closing(Link(member.url, context, proxy=config.proxy)) as link:
            date = link.date("/ca")
            yield Check("coordinator", True, member.url)
            yield _clock(date, wall())
            yield _membership(link, member, date if date is not None else wall())
    except CertificateExpired:
        yield Check("certificate", False, "expired", _RENEWED)
    except (Unreachable, ServerRefused) as error:
        yield Check("coordinator", False, str(error), "check the address, the network, the proxy")
        yield _clock(unverified_date(member.url, config.proxy), wall())


def _membership(link: Link, member: Identity, date: float) -> Check:
    """Whether the coordinator accepts this certificate, by a request that changes nothing there."""
    try:
        link.content(f"/blobs/{'0' * 64}")
    except ServerRefused as refused:
        if refused.code in _CERTIFICATE_REMEDIES:
            return Check("certificate", False, refused.message, _CERTIFICATE_REMEDIES[refused.code])
        if refused.is_transient:
            raise
    left = member.not_after - date
    return Check("certificate", True, f"accepted, and valid for {left / 86_400:.0f} more days")


def _clock(date: float | None, own: float) -> Check:
    ahead = own - date if date is not None else 0.0
    if abs(ahead) > CLOCK_TOLERANCE_SECONDS:
        return Check(
            "clock", False, describe_clock_error(ahead), "set it, for instance: timedatectl set-ntp true"
        )
    return Check(
        "clock", True, "agrees with the coordinator's" if date is not None else "nothing to compare with"
    )
