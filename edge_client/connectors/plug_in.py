"""Connectors of other packages, found by the entry-point group `fedloop.connectors`. Only what is installed runs.

An entry is a function of a `DataConfig` that returns a `Connector`. What that one gives is checked, so that a
mistake in it is told by its name and not met in the middle of training.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np

from edge_client.connectors.connector import Connector, DataConfig, DataProblem, Preview
from edge_client.train.trainer import Examples


def open_plug_in(config: DataConfig, entry: EntryPoint) -> Connector:
    """The plug-in's connector.

    Raises:
        DataProblem: it cannot be imported, or does not take the configuration.
    """
    return _Checked(entry.value, _tried(entry.value, lambda: entry.load()(config)))


class _Checked:
    """Another connector, whose mistakes are problems with words."""

    def __init__(self, name: str, connector: Connector) -> None:
        self._name = name
        self._connector = connector

    def train(self) -> Examples:
        return self._examples("train")

    def held_out(self) -> Examples:
        return self._examples("held_out")

    def preview(self) -> Preview:
        found = _tried(self._name, self._connector.preview)
        if not isinstance(found, Preview):
            raise DataProblem(
                f"connector {self._name}: preview() gave {type(found).__name__}, expected Preview"
            )
        return found

    def _examples(self, which: str) -> Examples:
        found = _tried(self._name, lambda: getattr(self._connector, which)())
        fits = isinstance(found, Examples) and (
            isinstance(found.x, np.ndarray)
            and isinstance(found.y, np.ndarray)
            and found.x.dtype in (np.float32, np.int32)
            and found.y.dtype == np.int32
            and len(found.x) == len(found.y)
        )
        if not fits:
            raise DataProblem(
                f"connector {self._name}: {which}() must give Examples of x, float32 or int32, and y, int32, of one length"
            )
        examples: Examples = found
        return examples


def _tried(name: str, call: Any) -> Any:
    try:
        return call()
    except (DataProblem, MemoryError):
        raise
    except Exception as error:
        raise DataProblem(f"connector {name}: {type(error).__name__}: {error}") from error
