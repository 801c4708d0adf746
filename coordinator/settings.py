"""Settings of `fedloop serve`: read once from options and `FEDLOOP_*` variables, passed on as a frozen value.

A field annotated with an `Option` is an option of the command: `coordinator.commands.options` derives its flag, environment
variable, help and default from the field, and `read_settings` checks its value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from coordinator import option_parsers as parse
from coordinator.errors import UserError
from coordinator.option_parsers import Address

DEFAULT_OPERATOR = Address("127.0.0.1", 8080)
_DEFAULT_DEVICE = Address("127.0.0.1", 8443)


@dataclass(frozen=True)
class Option:
    """An option of `fedloop serve`.

    Attributes:
        parse: value on the command line -> value of the field; raises ValueError.
        variable: environment variable that gives the value where the command line does not.
    """

    flag: str
    help: str
    parse: Callable[[Any], Any] = lambda value: value
    variable: str | None = None
    metavar: str | None = None


@dataclass(frozen=True)
class Settings:
    """Where the coordinator keeps its state, where it listens, and its policies.

    Attributes:
        device_url: goes into enrolment tokens. Empty: https, the first of `names`, and the device port.
        renew_after_expiry_days: how long after its end a device's certificate may still be renewed.
        workers: worker processes of one run, for initial params and evaluation.
    """

    home: Annotated[
        Path,
        Option(
            "--home",
            "Folder of all state; one coordinator at a time uses it. Default: fedloop among the user's data.",
            lambda path: path.expanduser().absolute(),
            "FEDLOOP_HOME",
        ),
    ]
    database_url: Annotated[
        str,
        Option(
            "--database-url",
            "SQLAlchemy URL, such as postgresql+psycopg://… Default: SQLite in the home.",
            variable="FEDLOOP_DATABASE_URL",
        ),
    ]
    operator: Annotated[
        Address,
        Option(
            "--operator", "Where the operator API listens.", parse.address, "FEDLOOP_OPERATOR", "HOST:PORT"
        ),
    ] = DEFAULT_OPERATOR
    device: Annotated[
        Address,
        Option("--device", "Where the device API listens.", parse.address, "FEDLOOP_DEVICE", "HOST:PORT"),
    ] = _DEFAULT_DEVICE
    names: Annotated[
        tuple[str, ...],
        Option(
            "--name",
            "Host name or address in the server's certificate; may be repeated.",
            parse.host_names,
        ),
    ] = ("localhost", "127.0.0.1")
    device_url: Annotated[
        str, Option("--device-url", "URL that devices connect to.", parse.https_origin, "FEDLOOP_DEVICE_URL")
    ] = ""
    ca_certificate: Annotated[
        Path | None,
        Option("--ca-cert", "Certificate of your own CA, PEM. Default: a new CA.", parse.existing_path),
    ] = None
    ca_key: Annotated[
        Path | None, Option("--ca-key", "Private key of that CA, PEM.", parse.existing_path)
    ] = None
    trusted_proxies: Annotated[
        tuple[str, ...],
        Option(
            "--trusted-proxy",
            "Address of a proxy whose forwarded client certificates are trusted; may be repeated.",
            parse.networks,
        ),
    ] = ()
    needs_approval: Annotated[bool, Option("--approve", "A person approves every enrolment.")] = False
    certificate_days: Annotated[
        float,
        Option(
            "--certificate-days",
            "Lifetime of a device's certificate.",
            parse.number(1 / 24, 3650),
            metavar="DAYS",
        ),
    ] = 30.0
    renew_after_expiry_days: float = 90.0
    lease_seconds: Annotated[
        float,
        Option(
            "--lease-seconds",
            "Silence of a device after which its task is released.",
            parse.number(5, 86_400),
            "FEDLOOP_LEASE_SECONDS",
            "SECONDS",
        ),
    ] = 120.0
    checkins_per_second: Annotated[
        float,
        Option(
            "--checkins-per-second",
            "Rate to which the check-ins of all devices are paced.",
            parse.number(0.1, 10_000),
            metavar="RATE",
        ),
    ] = 100.0
    held: Annotated[
        int,
        Option(
            "--held",
            "Maximum number of devices that wait for a task in a long poll.",
            parse.integer(0, 50_000),
            metavar="COUNT",
        ),
    ] = 1000
    upload_memory_bytes: Annotated[
        int,
        Option(
            "--upload-memory",
            "Memory for concurrent uploads, 1 MiB each; further ones are told to retry.",
            parse.integer(2**20, 2**40),
            metavar="BYTES",
        ),
    ] = 8 * 2**20
    workers: int = 1
    job_slots: Annotated[
        int,
        Option(
            "--job-slots",
            "Processes that jobs of the API may use together; a job takes one, a pretraining one for each of its plan. 0: no jobs.",
            parse.integer(0, 4096),
            "FEDLOOP_JOB_SLOTS",
            "COUNT",
        ),
    ] = 2
    data_dir: Annotated[
        Path | None,
        Option("--data-dir", "Folder that holds the data files.", parse.existing_path, "FEDLOOP_DATA_DIR"),
    ] = None
    allow_paths: Annotated[
        tuple[Path, ...],
        Option(
            "--allow-path",
            "Further folder with files that experiments may name (data.path, model.init); may be repeated.",
            parse.existing_folders,
            metavar="DIR",
        ),
    ] = ()
    allow_code: Annotated[
        tuple[str, ...],
        Option(
            "--allow-code",
            "Code of your own, such as mine:build or mine:Median, that experiments may name (model, data, strategy) and "
            "workers then run, in a sandbox; "
            "may be repeated. Default: none.",
            parse.code_references,
            metavar="MODULE:FUNCTION",
        ),
    ] = ()
    no_sandbox: Annotated[
        bool,
        Option(
            "--no-sandbox",
            "Start workers unconfined: where the kernel has no Landlock, --allow-code needs it. The code can then "
            "read this coordinator's keys.",
        ),
    ] = False
    log_format: Annotated[
        str,
        Option(
            "--log-format",
            "auto, text or json.",
            parse.choice("auto", "text", "json"),
            "FEDLOOP_LOG_FORMAT",
        ),
    ] = "auto"
    insecure_operator: Annotated[
        bool,
        Option("--insecure-operator", "Let the operator API, plain HTTP, listen beyond this machine."),
    ] = False
    oidc_issuer: Annotated[
        str,
        Option(
            "--oidc-issuer",
            "OpenID provider at which people may sign in: its issuer, such as https://login.example.org.",
            parse.issuer,
            "FEDLOOP_OIDC_ISSUER",
            "URL",
        ),
    ] = ""
    oidc_client_id: Annotated[
        str,
        Option(
            "--oidc-client-id",
            "Our client at that provider.",
            variable="FEDLOOP_OIDC_CLIENT_ID",
            metavar="ID",
        ),
    ] = ""
    oidc_client_secret_file: Annotated[
        Path | None,
        Option(
            "--oidc-client-secret-file",
            "File with the secret of that client. Default: the secret in FEDLOOP_OIDC_CLIENT_SECRET; without one, a public "
            "client.",
            parse.existing_path,
            "FEDLOOP_OIDC_CLIENT_SECRET_FILE",
        ),
    ] = None
    oidc_roles: Annotated[
        tuple[str, ...],
        Option(
            "--oidc-role",
            "Role of the users whose claim has a value, such as ml-team=data_scientist or ward-3=viewer@clinic-a; may be "
            "repeated, in each project the first that fits counts.",
            tuple,
            metavar="VALUE=ROLE[@PROJECT]",
        ),
    ] = ()
    oidc_claim: Annotated[
        str,
        Option(
            "--oidc-claim",
            "Claim of the ID token that gives roles; dots lead into objects, as in realm_access.roles.",
            metavar="NAME",
        ),
    ] = "groups"
    oidc_scope: Annotated[
        str, Option("--oidc-scope", "Scopes to ask the provider for.", parse.scopes, metavar="SCOPES")
    ] = "openid profile email"
    oidc_client_secret: str = field(default="", repr=False)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders with files that an experiment may name."""
        return (*((self.data_dir,) if self.data_dir else ()), *self.allow_paths)

    @property
    def certificate_lifetime(self) -> timedelta:
        return timedelta(days=self.certificate_days)

    def with_ports(self, operator: int, device: int) -> Settings:
        """These settings with the ports that were bound, and with `device_url` filled in."""
        return replace(
            self,
            operator=self.operator._replace(port=operator),
            device=self.device._replace(port=device),
            device_url=self.device_url or f"https://{Address(self.names[0], device)}",
        )


def options() -> dict[str, tuple[Any, Option]]:
    """Field -> its type and its option, of all fields of `Settings` that are options."""
    hints = get_type_hints(Settings, include_extras=True)
    return {
        name: (hint.__origin__, hint.__metadata__[0])
        for name, hint in hints.items()
        if hasattr(hint, "__metadata__")
    }


def read_settings(values: Mapping[str, Any]) -> Settings:
    """The settings of these values of options, by field; what is missing or None has its default.

    Raises:
        UserError: listing every bad value.
    """
    parsed, problems = {}, []
    for name, (_, option) in options().items():
        if (value := values.get(name)) is None:
            continue
        try:
            parsed[name] = option.parse(value)
        except ValueError as error:
            problems.append(f"{option.flag} {value}: {error}")
    if problems:
        raise UserError("\n".join(problems))
    home = parsed.setdefault("home", default_home())
    parsed.setdefault("database_url", f"sqlite:///{home / 'fedloop.db'}")
    parsed["oidc_client_secret"] = _client_secret(parsed.get("oidc_client_secret_file"))
    settings = Settings(**parsed)
    _require_consistent(settings)
    if not values.get("names") and settings.device.host not in (*settings.names, "0.0.0.0", "::"):
        return replace(settings, names=(*settings.names, settings.device.host))
    return settings


def _require_consistent(settings: Settings) -> None:
    if (settings.ca_certificate is None) != (settings.ca_key is None):
        raise UserError("--ca-cert and --ca-key belong together: give both, or neither")
    if not settings.insecure_operator and not settings.operator.is_loopback:
        raise UserError(
            f"--operator {settings.operator}: the operator API speaks plain HTTP and would send the admin token over the "
            "network in clear; leave it on loopback and reach it through a tunnel or a TLS proxy, or say "
            "--insecure-operator"
        )


def _client_secret(file: Path | None) -> str:
    """The secret of our client at the OpenID provider, which no option takes: other users can read a command line."""
    if file is None:
        return os.environ.get("FEDLOOP_OIDC_CLIENT_SECRET", "").strip()
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"--oidc-client-secret-file {file}: {reason}") from None


def default_home() -> Path:
    """Where a coordinator keeps its state by default: `FEDLOOP_HOME`, else `fedloop` among the user's data."""
    if home := os.environ.get("FEDLOOP_HOME"):
        return Path(home).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data).expanduser().absolute() / "fedloop"
