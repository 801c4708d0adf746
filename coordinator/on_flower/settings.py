"""What Flower tells our apps: the run configuration, and the configuration of a node.

    flwr run DIR --run-config "out='/srv/runs/mine' rows='dealt'"
    flower-supernode --node-config "partition-id=0 num-partitions=2 data-dir='/srv/data'"
    flower-supernode --node-config "partition-id=1 num-partitions=2 edge-config='/etc/fedloop/edge.toml'"

With rows = "dealt" every node loads the experiment's data set and trains on its part of the partition. With rows = "own" it
trains on rows of its own, which a device's configuration file describes; its number still says which client it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.errors import UserError

if TYPE_CHECKING:
    from flwr.app import Context  # the folder of an app is written without Flower

EXPERIMENT = "experiment.toml"
"""The experiment in the folder of a Flower app."""

DEFAULTS = {"out": "", "rows": "dealt", "data-dir": ""}
"""The run configuration."""


@dataclass(frozen=True)
class RunSettings:
    """The run configuration.

    Attributes:
        out: the run's folder, on the machine of the ServerApp.
        own_rows: whether nodes train on rows of their own.
        data_dir: folder of data files, on every machine.
    """

    out: Path
    own_rows: bool = False
    data_dir: Path | None = None


@dataclass(frozen=True)
class NodeSettings:
    """What a node is to be.

    Attributes:
        edge_config: file that describes the node's own rows, as that of a device; None: it trains on a part of the data set.
        data_dir: folder of data files on its machine.
    """

    partition: int
    partitions: int
    edge_config: Path | None
    data_dir: Path | None


def read_run(context: Context) -> RunSettings:
    """The settings of the ServerApp.

    Raises:
        UserError: `out` is not an absolute path, or `rows` is unknown.
    """
    out = str(context.run_config.get("out", ""))
    if not Path(out).is_absolute():
        raise UserError(
            f"out = {out!r} is not an absolute path of the run's folder; the ServerApp has a working directory of its own: "
            "flwr run --run-config \"out='/…'\""
        )
    return RunSettings(Path(out), _has_own_rows(context), _path(context.run_config, "data-dir"))


def read_node(context: Context) -> NodeSettings:
    """The settings of a ClientApp.

    Raises:
        UserError: the node is not told which client it is, or where its own rows are.
    """
    node = context.node_config
    keys = ("partition-id", "num-partitions")
    if any(not isinstance(node.get(key), int) for key in keys):
        given = ", ".join(f"{key}={node[key]}" for key in keys if key in node) or "neither"
        raise UserError(
            f"the node's configuration gives {given}; expected both numbers: "
            "flower-supernode --node-config 'partition-id=0 num-partitions=2'"
        )
    edge_config = _path(node, "edge-config")
    if _has_own_rows(context) and edge_config is None:
        raise UserError(
            "rows = 'own', but the node's configuration names no rows: "
            "flower-supernode --node-config \"… edge-config='/etc/fedloop/edge.toml'\""
        )
    return NodeSettings(
        int(node["partition-id"]),
        int(node["num-partitions"]),
        edge_config if _has_own_rows(context) else None,
        _path(node, "data-dir") or _path(context.run_config, "data-dir"),
    )


def _has_own_rows(context: Context) -> bool:
    rows = str(context.run_config.get("rows", DEFAULTS["rows"]))
    if rows not in ("dealt", "own"):
        raise UserError(f"rows = {rows!r}: expected 'dealt' or 'own'")
    return rows == "own"


def _path(config: Mapping[str, Any], key: str) -> Path | None:
    given = str(config.get(key, ""))
    return Path(given) if given else None
