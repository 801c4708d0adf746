"""The daemon's configuration: a TOML file, then `FEDLOOP_EDGE_*` variables, then flags; the later wins.

    name = "pump-7"                      # for people; default: the host's name
    state_dir = "/var/lib/fedloop-edge"
    device_class = "gateway"
    runtimes = ["litert", "torch"]       # allowed, in order of preference
    opt_out = ["some-run"]               # runs, by name or id, this device takes no part in
    deflate_uploads = false
    proxy = "http://proxy:3128"          # default: HTTPS_PROXY, with NO_PROXY
    outbox_bytes = 1_000_000_000         # most disk kept for results that wait to be delivered
    download_bytes = 4_000_000_000       # most disk for models and artifacts
    [releases]
    root = "/etc/fedloop/root.json"      # the first root of the models' releases; default: pinned at first contact
    [labels]
    site = "berlin"
    [limits]                             # of a training process
    memory_bytes = 1_000_000_000
    [conditions]                         # under which it may train
    on_ac_power = true
    [data.digits]                        # what an experiment calls `digits`
    kind = "csv"
    path = "/data/digits.csv"

A variable is the key in capitals with dots as underscores (`FEDLOOP_EDGE_LIMITS_MEMORY_BYTES=…`); a flag is
`--set limits.memory_bytes=…`. Both take a TOML value, else a string. Data sets and labels: file and flags only.
All that is wrong is told at once.
"""

from __future__ import annotations

import difflib
import os
import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from edge_client.connectors import DataConfig
from edge_client.eligibility import Conditions
from edge_client.errors import UserMistake
from edge_client.train.process import Limits
from edge_client.wire.device import RuntimeName
from edge_client.wire.strict import Unfit, read, shown

PREFIX = "FEDLOOP_EDGE_"
FILE_VARIABLE = "FEDLOOP_EDGE_CONFIG"
_NO_KEYS = {FILE_VARIABLE}

_PLAIN: dict[str, Any] = {
    "name": str,
    "state_dir": str,
    "device_class": str,
    "runtimes": tuple[RuntimeName, ...],
    "opt_out": tuple[str, ...],
    "deflate_uploads": bool,
    "proxy": str,
    "outbox_bytes": int,
    "download_bytes": int,
}


@dataclass(frozen=True)
class ReleaseTrust:
    """`root`: a file with the first root of the releases' repository; empty: the one shown at first contact is pinned."""

    root: str = ""


@dataclass(frozen=True)
class EdgeConfig:
    """What holds for this daemon. Sizes in bytes."""

    name: str
    state_dir: Path
    limits: Limits
    conditions: Conditions
    labels: Mapping[str, str] = field(default_factory=dict)
    device_class: str = ""
    runtimes: tuple[str, ...] = ("litert", "torch", "tensorflow")
    data: Mapping[str, DataConfig] = field(default_factory=dict)
    opt_out: tuple[str, ...] = ()
    deflate_uploads: bool = False
    proxy: str = ""
    outbox_bytes: int = 1_000_000_000
    download_bytes: int = 4_000_000_000
    releases: ReleaseTrust = ReleaseTrust()


@dataclass(frozen=True)
class Loaded:
    """A configuration, and where each value came from: key -> (value, origin in words)."""

    config: EdgeConfig
    origins: Mapping[str, tuple[Any, str]]


@dataclass(frozen=True)
class _Given:
    value: Any
    origin: str


def load(file: Path | None, environment: Mapping[str, str], sets: Sequence[str] = ()) -> Loaded:
    """The configuration from all three layers.

    Raises:
        UserMistake: listing everything that is wrong, with where it stands and what was expected.
    """
    wrong: list[str] = []
    given = {
        **_from_file(file or usual_file(environment), wrong),
        **_from_environment(environment, wrong),
        **_from_flags(sets, wrong),
    }
    values = {key: _checked(key, entry, wrong) for key, entry in given.items()}
    wrong += _incomplete_data(values)
    try:
        conditions = Conditions(**_table(values, "conditions"))
    except (UserMistake, TypeError) as error:
        wrong.append(str(error))
    if wrong:
        raise UserMistake("\n".join(wrong))
    config = _built(values, conditions)
    return Loaded(config, _origins(config, given))


def usual_file(environment: Mapping[str, str]) -> Path | None:
    """`FEDLOOP_EDGE_CONFIG`, else the person's own, else the machine's, where there is one."""
    if environment.get(FILE_VARIABLE):
        return Path(environment[FILE_VARIABLE])
    own = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fedloop" / "edge.toml"
    return next((path for path in (own, Path("/etc/fedloop/edge.toml")) if path.exists()), None)


def _from_file(path: Path | None, wrong: list[str]) -> dict[str, _Given]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        wrong.append(
            f"{path}: cannot be read: {error.strerror}; give another with --config or {FILE_VARIABLE}"
        )
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        wrong.append(f"{path}: is not TOML: {error}")
        return {}
    folder = path.absolute().parent
    return {key: _Given(_beside(key, value, folder), str(path)) for key, value in _flat(document).items()}


def _beside(key: str, value: Any, folder: Path) -> Any:
    """A relative path in a file is meant from that file's folder, wherever the daemon is started."""
    named = key in ("state_dir", "releases.root") or (key.startswith("data.") and key.endswith(".path"))
    return str(folder / Path(value).expanduser()) if named and isinstance(value, str) else value


def _flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """`{"limits": {"seconds": 1}}` as `{"limits.seconds": 1}`; a table of data two levels deep."""
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


def _from_environment(environment: Mapping[str, str], wrong: list[str]) -> dict[str, _Given]:
    keys = {PREFIX + key.upper().replace(".", "_"): key for key in _kinds()}
    given = {}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in _NO_KEYS:
            continue
        if variable not in keys:
            wrong.append(f"environment: unknown variable {variable}{_nearest(variable, keys)}")
            continue
        key = keys[variable]
        given[key] = _Given(_toml_value(environment[variable], key), variable)
    return given


def _from_flags(sets: Sequence[str], wrong: list[str]) -> dict[str, _Given]:
    given = {}
    for each in sets:
        key, equals, text = each.partition("=")
        if not equals:
            wrong.append(f"--set {each}: expected key=value")
            continue
        given[key.strip()] = _Given(_toml_value(text, key.strip()), f"--set {key.strip()}")
    return given


def _toml_value(text: str, key: str) -> Any:
    if _kinds().get(key) is str or key.startswith("labels."):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _kinds() -> dict[str, Any]:
    """Every key whose name is fixed, and the kind of its value."""
    tables = {"limits": Limits, "conditions": Conditions, "releases": ReleaseTrust}
    return _PLAIN | {
        f"{table}.{name}": kind
        for table, cls in tables.items()
        for name, kind in get_type_hints(cls).items()
        if name in {each.name for each in fields(cls)}
    }


def _checked(key: str, entry: _Given, wrong: list[str]) -> Any:
    kind = _kinds().get(key)
    table, _, rest = key.partition(".")
    if kind is None and table == "labels" and rest:
        kind = str
    elif kind is None and table == "data" and rest.count("."):
        kind = str if rest.rpartition(".")[2] in ("kind", "path") else Any
    if kind is None:
        wrong.append(
            f"{entry.origin}: unknown key {key!r}{_nearest(key, [*_kinds(), 'labels.…', 'data.….kind'])}"
        )
        return None
    try:
        value = read(kind, entry.value, key)
    except Unfit as error:
        wrong.append(f"{entry.origin}: {error}")
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        wrong.append(f"{entry.origin}: {key} is {shown(value)}, expected 0 or more")
    return value


def _nearest(name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


def _incomplete_data(values: Mapping[str, Any]) -> list[str]:
    return [
        f'data.{name} has no kind; expected for instance kind = "csv"'
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


def _built(values: Mapping[str, Any], conditions: Conditions) -> EdgeConfig:
    plain = {key: value for key, value in values.items() if key in _PLAIN}
    plain.setdefault("name", socket.gethostname())
    plain["state_dir"] = Path(plain.get("state_dir") or _usual_state_dir()).absolute()
    return EdgeConfig(
        **plain,
        limits=_limits(_table(values, "limits")),
        conditions=conditions,
        labels=_table(values, "labels"),
        releases=ReleaseTrust(**_table(values, "releases")),
        data={
            name: DataConfig(
                kind=table.pop("kind"),
                path=_path(table.pop("path", None)),
                options=dict(sorted(table.items())),
            )
            for name, table in sorted(_data_tables(values).items())
        },
    )


def _path(text: str | None) -> Any:
    return Path(text).expanduser() if text is not None else None


def _table(values: Mapping[str, Any], table: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(table + ".")}


def _limits(given: Mapping[str, Any]) -> Limits:
    """Unless told otherwise a training process gets half of the machine's memory and an hour."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    usual = {"memory_bytes": machine // 2, "cpu_seconds": 3600, "seconds": 3600}
    return Limits(**{**usual, **given})


def _usual_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/fedloop-edge")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedloop-edge"


def _origins(config: EdgeConfig, given: Mapping[str, _Given]) -> dict[str, tuple[Any, str]]:
    shown_values: dict[str, Any] = {key: getattr(config, key) for key in _PLAIN}
    for table in ("limits", "conditions", "releases"):
        inner = getattr(config, table)
        shown_values.update({f"{table}.{each.name}": getattr(inner, each.name) for each in fields(inner)})
    shown_values.update({f"labels.{key}": value for key, value in config.labels.items()})
    shown_values.update({key: entry.value for key, entry in given.items() if key.startswith("data.")})
    return {
        key: (value, given[key].origin if key in given else "default") for key, value in shown_values.items()
    }
