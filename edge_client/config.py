"""The daemon's configuration: a TOML file, then `FEDLOOP_EDGE_*` variables, then flags; later ones override.

    name = "pump-7"                      # for people; default: the host's name
    state_dir = "/var/lib/fedloop-edge"
    device_class = "gateway"
    runtimes = ["litert", "torch"]       # allowed, in order of preference
    opt_out = ["some-run"]               # runs, by name or id, that this device takes no part in
    require_secure_aggregation = false   # no update leaves unless it is masked
    require_noise = false                # no update leaves unless this device adds noise
    deflate_uploads = false
    proxy = "http://proxy:3128"          # default: HTTPS_PROXY, with NO_PROXY
    relay = "https://relay:8444"         # through which to reach the coordinator; default: where it enrolled
    outbox_bytes = 1_000_000_000         # most disk for results waiting for delivery
    download_bytes = 4_000_000_000       # most disk for models and artifacts
    [releases]
    root = "/etc/fedloop/root.json"      # the first root of the models' releases; default: pinned at first contact
    trial_seconds = 60                   # how long a daemon must run with a new version to end its trial
    [statistics]
    allowed = true                       # whether the device may report statistics of its data
    minimum_count = 10                   # rows from which it reports a count
    [labels]
    site = "berlin"
    [limits]                             # of a training process
    memory_bytes = 1_000_000_000
    [conditions]                         # under which it may train
    on_ac_power = true
    [data.digits]                        # what an experiment calls `digits`
    kind = "csv"
    path = "/data/digits.csv"

A variable is the key in capitals with underscores for dots (`FEDLOOP_EDGE_LIMITS_MEMORY_BYTES=…`); a flag is
`--set limits.memory_bytes=…`. Both take a TOML value or else a string. Data sets and labels: file and flags only.
All errors are reported at once.
"""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from edge_client.data import DataConfig
from edge_client.eligibility import Conditions
from edge_client.errors import UserError
from edge_client.processes import memory
from edge_client.train.process import Limits
from edge_client.wire.device import RuntimeName
from edge_client.wire.statistics import MINIMUM_COUNT
from edge_client.wire.strict import InvalidDocument, abbreviate, read, require_bounded
from strategies.suggestions import suggest

PREFIX = "FEDLOOP_EDGE_"
FILE_VARIABLE = "FEDLOOP_EDGE_CONFIG"
_NO_KEYS = {FILE_VARIABLE}


@dataclass(frozen=True)
class ReleaseOptions:
    """The trust in releases, and their trial.

    Attributes:
        root: a file with the first root of the releases' repository; empty: pin the one received at first contact.
        trial_seconds: how long the daemon must run with a version to end its trial.
    """

    root: str = ""
    trial_seconds: float = 60.0


@dataclass(frozen=True)
class StatisticsOptions:
    """What the device may report of its data besides updates and evaluations.

    Attributes:
        allowed: whether it does statistics tasks.
        minimum_count: rows from which it reports a count, >= 2; a coordinator may ask for more.
    """

    allowed: bool = True
    minimum_count: int = MINIMUM_COUNT


@dataclass(frozen=True)
class EdgeConfig:
    """The daemon's configuration. Sizes in bytes.

    Attributes:
        name: for people; default: the host's name.
        state_dir: folder of the daemon's state.
        device_class: free text, such as `gateway`.
        runtimes: allowed ones, in order of preference.
        opt_out: runs, by name or id, that this device takes no part in.
        require_secure_aggregation: whether updates leave only masked, in runs with secure aggregation.
        require_noise: whether updates leave only with noise that this device adds.
        deflate_uploads: whether uploads are compressed.
        proxy: URL of an HTTP proxy; default: HTTPS_PROXY, with NO_PROXY.
        relay: URL of the relay through which it reaches the coordinator; default: the address at which it enrolled.
        outbox_bytes: most disk for results that wait for delivery.
        download_bytes: most disk for models and artifacts.
    """

    name: str
    state_dir: Path
    limits: Limits
    conditions: Conditions
    labels: Mapping[str, str] = field(default_factory=dict)
    device_class: str = ""
    runtimes: tuple[RuntimeName, ...] = ("litert", "torch", "tensorflow")
    data: Mapping[str, DataConfig] = field(default_factory=dict)
    opt_out: tuple[str, ...] = ()
    require_secure_aggregation: bool = False
    require_noise: bool = False
    deflate_uploads: bool = False
    proxy: str = ""
    relay: str = ""
    outbox_bytes: int = 1_000_000_000
    download_bytes: int = 4_000_000_000
    releases: ReleaseOptions = ReleaseOptions()
    statistics: StatisticsOptions = StatisticsOptions()

    @property
    def memory_bytes(self) -> int:
        """What training or a model may use here: `limits.memory_bytes`, at most what the machine or its container has."""
        total = memory.total_bytes()
        return min(self.limits.memory_bytes or total, total)


_TABLES = ("limits", "conditions", "labels", "data", "releases", "statistics")
_PLAIN = {key: kind for key, kind in get_type_hints(EdgeConfig).items() if key not in _TABLES}
_PLAIN["state_dir"] = str


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and its origins: key -> (value, description of its origin)."""

    config: EdgeConfig
    origins: Mapping[str, tuple[Any, str]]


@dataclass(frozen=True)
class _Entry:
    value: Any
    origin: str


def load(file: Path | None, environment: Mapping[str, str], sets: Sequence[str] = ()) -> LoadedConfig:
    """Loads the configuration from all three layers.

    Raises:
        UserError: listing all errors, with their places and the expected values.
    """
    problems: list[str] = []
    entries = {
        **_from_file(file or default_file(environment), problems),
        **_from_environment(environment, problems),
        **_from_flags(sets, problems),
    }
    values = {key: _checked(key, entry, problems) for key, entry in entries.items()}
    problems += _incomplete_data(values)
    try:
        # unknown keys and wrong types are reported above
        valid = {key: value for key, value in values.items() if key in _kinds() and value is not None}
        conditions = Conditions(**_table(valid, "conditions"))
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    config = _build(values, conditions)
    return LoadedConfig(config, _origins(config, entries))


def default_file(environment: Mapping[str, str]) -> Path | None:
    """`FEDLOOP_EDGE_CONFIG`, else the user's file, else the machine's, if it exists."""
    if environment.get(FILE_VARIABLE):
        return Path(environment[FILE_VARIABLE])
    own = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fedloop" / "edge.toml"
    return next((path for path in (own, Path("/etc/fedloop/edge.toml")) if path.exists()), None)


def _from_file(path: Path | None, problems: list[str]) -> dict[str, _Entry]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        problems.append(
            f"{path}: cannot be read: {error.strerror}; choose another with --config or {FILE_VARIABLE}"
        )
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path}: is not valid TOML: {error}")
        return {}
    folder = path.absolute().parent
    return {
        key: _Entry(_resolve_path(key, value, folder), str(path)) for key, value in _flatten(document).items()
    }


def _resolve_path(key: str, value: Any, folder: Path) -> Any:
    """Resolves a relative path from the configuration file's folder, wherever the daemon is started."""
    is_path = key in ("state_dir", "releases.root") or (key.startswith("data.") and key.endswith(".path"))
    return str(folder / Path(value).expanduser()) if is_path and isinstance(value, str) else value


def _flatten(document: Mapping[str, Any]) -> dict[str, Any]:
    """`{"limits": {"seconds": 1}}` as `{"limits.seconds": 1}`; data tables have two levels."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if not isinstance(value, dict) or key in _PLAIN:
            flat[key] = value
            continue
        for name, inner in value.items():
            if key == "data" and isinstance(inner, dict):
                flat.update({f"data.{name}.{option}": each for option, each in inner.items()})
            else:
                flat[f"{key}.{name}"] = inner
    return flat


def _from_environment(environment: Mapping[str, str], problems: list[str]) -> dict[str, _Entry]:
    keys = {PREFIX + key.upper().replace(".", "_"): key for key in _kinds()}
    entries = {}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in _NO_KEYS:
            continue
        if variable not in keys:
            problems.append(
                f"environment: unknown variable {variable}{suggest(variable, keys) or _listed(keys)}"
            )
            continue
        key = keys[variable]
        entries[key] = _Entry(_toml_value(environment[variable], key), variable)
    return entries


def _from_flags(sets: Sequence[str], problems: list[str]) -> dict[str, _Entry]:
    entries = {}
    for each in sets:
        key, equals, text = each.partition("=")
        if not equals:
            problems.append(f"--set {each}: expected key=value")
            continue
        entries[key.strip()] = _Entry(_toml_value(text, key.strip()), f"--set {key.strip()}")
    return entries


def _toml_value(text: str, key: str) -> Any:
    if _kinds().get(key) is str or key.startswith("labels."):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _kinds() -> dict[str, Any]:
    """Every key with a fixed name, and the type of its value."""
    tables = {
        "limits": Limits,
        "conditions": Conditions,
        "releases": ReleaseOptions,
        "statistics": StatisticsOptions,
    }
    return _PLAIN | {
        f"{table}.{name}": kind
        for table, cls in tables.items()
        for name, kind in get_type_hints(cls).items()
        if name in {each.name for each in fields(cls)}
    }


def _checked(key: str, entry: _Entry, problems: list[str]) -> Any:
    kind = _kinds().get(key)
    table, _, rest = key.partition(".")
    if kind is None and table == "labels" and rest:
        kind = str
    elif kind is None and table == "data" and rest.count("."):
        kind = str if rest.rpartition(".")[2] in ("kind", "path") else Any
    if kind is None:
        known = [*_kinds(), "labels.…", "data.….kind"]
        problems.append(f"{entry.origin}: unknown key {key!r}{suggest(key, known) or _listed(known)}")
        return None
    try:
        value = read(kind, entry.value, key)
    except InvalidDocument as error:
        problems.append(f"{entry.origin}: {error}")
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        problems.append(f"{entry.origin}: {key} is {abbreviate(value)}, expected 0 or more")
    elif key == "relay" and value and not value.startswith("https://"):
        problems.append(f"{entry.origin}: relay is {value!r}, expected https://HOST:PORT")
    elif key == "statistics.minimum_count" and value < 2:
        problems.append(f"{entry.origin}: {key} is {value}, expected 2 or more")
    return value


def _listed(known: Iterable[str]) -> str:
    return f"; known: {', '.join(sorted(known))}"


def _incomplete_data(values: Mapping[str, Any]) -> list[str]:
    return [
        f'data.{name} has no kind; expected for example kind = "csv"'
        for name, table in _data_tables(values).items()
        if table.get("kind") is None
    ]


def _data_tables(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith("data.") and key.count(".") >= 2:
            name, _, option = key.removeprefix("data.").rpartition(".")
            tables.setdefault(name, {})[option] = value
    return tables


def _build(values: Mapping[str, Any], conditions: Conditions) -> EdgeConfig:
    plain = {key: value for key, value in values.items() if key in _PLAIN}
    plain.setdefault("name", socket.gethostname())
    plain["state_dir"] = Path(plain.get("state_dir") or _default_state_dir()).absolute()
    return _require_reportable(
        EdgeConfig(
            **plain,
            limits=_limits(_table(values, "limits")),
            conditions=conditions,
            labels=_table(values, "labels"),
            releases=ReleaseOptions(**_table(values, "releases")),
            statistics=StatisticsOptions(**_table(values, "statistics")),
            data={
                name: DataConfig(
                    kind=table.pop("kind"),
                    path=Path(table.pop("path")).expanduser() if "path" in table else None,
                    options=dict(sorted(table.items())),
                )
                for name, table in sorted(_data_tables(values).items())
            },
        )
    )


def _require_reportable(config: EdgeConfig) -> EdgeConfig:
    """The configuration, if a check-in can report it: a coordinator refuses longer texts."""
    reported: dict[str, Any] = {
        "name": config.name,
        "device_class": config.device_class,
        "opt_out": config.opt_out,
        "labels": config.labels,
        "data": tuple(config.data),
    }
    for key, value in reported.items():
        try:
            require_bounded(value, key)
        except InvalidDocument as error:
            raise UserError(f"{error}; a coordinator accepts no more") from None
    return config


def _table(values: Mapping[str, Any], table: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(table + ".")}


def _limits(configured: Mapping[str, Any]) -> Limits:
    """By default a training process gets half of the memory of the machine or its container, and an hour."""
    defaults = {"memory_bytes": memory.total_bytes() // 2, "cpu_seconds": 3600, "seconds": 3600}
    return Limits(**{**defaults, **configured})


def _default_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/fedloop-edge")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedloop-edge"


def _origins(config: EdgeConfig, entries: Mapping[str, _Entry]) -> dict[str, tuple[Any, str]]:
    values: dict[str, Any] = {key: getattr(config, key) for key in _PLAIN}
    for table in ("limits", "conditions", "releases", "statistics"):
        inner = getattr(config, table)
        values.update({f"{table}.{each.name}": getattr(inner, each.name) for each in fields(inner)})
    values.update({f"labels.{key}": value for key, value in config.labels.items()})
    values.update({key: entry.value for key, entry in entries.items() if key.startswith("data.")})
    return {
        key: (value, entries[key].origin if key in entries else "default") for key, value in values.items()
    }
