"""Settings of `fedloop serve`: read once from flags and `FEDLOOP_*` variables, passed on as a frozen value."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Where the coordinator keeps its state, what it listens on, and its policies.

    Attributes:
        home: folder of database, blobs, uploads, keys, admin token. One coordinator at a time.
        database_url: SQLAlchemy's; SQLite in `home` unless given.
        names: host names and addresses in the device API's server certificate.
        device_url: what devices are told to connect to; goes into enrolment tokens.
        ca_certificate, ca_key: PEM files of a CA of one's own; both or none.
        trusted_proxies: addresses whose forwarded client certificates are believed; none unless given.
        needs_approval: a person approves every enrolment.
        certificate_days: how long a device's certificate is valid.
        renew_after_expiry_days: how long after that it may still be renewed.
        held: most devices kept waiting in a long poll.
        checkins_per_second: what pacing spreads the fleet to.
        lease_seconds: silence after which a task is given up.
        workers: worker processes of one run, for initial params and evaluation.
        data_dir: where data sets of known names are looked for.
        allow_paths: further folders with files that an experiment may name.
        allow_code: references `package.module:function` to a user's code that an experiment may name.
        no_sandbox: worker processes are not confined.
    """

    home: Path
    database_url: str
    operator_host: str = "127.0.0.1"
    operator_port: int = 8080
    device_host: str = "127.0.0.1"
    device_port: int = 8443
    names: tuple[str, ...] = ("localhost", "127.0.0.1")
    device_url: str = "https://localhost:8443"
    ca_certificate: Path | None = None
    ca_key: Path | None = None
    trusted_proxies: tuple[str, ...] = ()
    needs_approval: bool = False
    certificate_days: float = 30.0
    renew_after_expiry_days: float = 90.0
    held: int = 1000
    checkins_per_second: float = 100.0
    lease_seconds: float = 120.0
    workers: int = 1
    data_dir: Path | None = None
    allow_paths: tuple[Path, ...] = ()
    allow_code: tuple[str, ...] = ()
    no_sandbox: bool = False

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files lie that an experiment may name."""
        return (*((self.data_dir,) if self.data_dir else ()), *self.allow_paths)

    @property
    def certificate_lifetime(self) -> timedelta:
        return timedelta(days=self.certificate_days)


def default_home() -> Path:
    """`FEDLOOP_HOME`, else `fedloop` among the user's data: where a coordinator keeps its state unless told."""
    if given := os.environ.get("FEDLOOP_HOME"):
        return Path(given).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data).expanduser().absolute() / "fedloop"
