"""What Flower tells our apps: the run configuration, and the configuration of a node.

flwr run DIR --run-config "out='/srv/runs/mine' data-dir='/srv/data'"
flower-supernode --node-config "partition-id=0 num-partitions=2"
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


@dataclass(frozen=True)
class RunSettings:
    """The run configuration.

    Attributes:
        out: the run's folder, on the machine of the ServerApp.
        data_dir: folder of data files, on every machine.
    """

    out: Path
    data_dir: Path | None


@dataclass(frozen=True)
class NodeSettings:
    """What a node is to be. `data_dir`: folder of data files on its machine."""

    partition: int
    partitions: int
    data_dir: Path | None


def read_run(context: Context) -> RunSettings:
    """The settings of the ServerApp.

    Raises:
        UserError: `out` is not an absolute path.
    """
    out = str(context.run_config.get("out", ""))
    if not Path(out).is_absolute():
        raise UserError(
            f"out = {out!r} is not an absolute path of the run's folder; the ServerApp has a working directory of its own: "
            "flwr run --run-config \"out='/…'\""
        )
    return RunSettings(Path(out), _folder(context.run_config))


def read_node(context: Context) -> NodeSettings:
    """The settings of a ClientApp.

    Raises:
        UserError: the node is not told which part of the data it holds.
    """
    node = context.node_config
    keys = ("partition-id", "num-partitions")
    if any(not isinstance(node.get(key), int) for key in keys):
        given = ", ".join(f"{key}={node[key]}" for key in keys if key in node) or "neither"
        raise UserError(
            f"the node's configuration gives {given}; expected both numbers: "
            "flower-supernode --node-config 'partition-id=0 num-partitions=2'"
        )
    partition, partitions = (int(node[key]) for key in keys)
    return NodeSettings(partition, partitions, _folder(node) or _folder(context.run_config))


def _folder(config: Mapping[str, Any]) -> Path | None:
    given = str(config.get("data-dir", ""))
    return Path(given) if given else None
