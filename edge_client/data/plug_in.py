"""Connectors of other packages, found by the entry-point group `fedloop.connectors`. Only what is installed runs.

An entry is a function of a `DataConfig` that returns a `Connector`. What the connector returns is checked, so that a
mistake in it is reported with its name, before training starts.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np

from edge_client.data.connector import Connector, DataConfig, DataProblem, Preview
from edge_client.data.examples import Examples


def open_plug_in(config: DataConfig, entry: EntryPoint) -> Connector:
    """The plug-in's connector.

    Raises:
        DataProblem: it cannot be imported, or does not take the configuration.
    """
    return _Checked(entry.value, _try(entry.value, lambda: entry.load()(config)))


class _Checked:
    """A connector whose mistakes become DataProblems."""

    def __init__(self, name: str, connector: Connector) -> None:
        self._name = name
        self._connector = connector

    def train(self) -> Examples:
        return self._examples("train")

    def held_out(self) -> Examples:
        return self._examples("held_out")

    def preview(self) -> Preview:
        returned = _try(self._name, self._connector.preview)
        if not isinstance(returned, Preview):
            raise DataProblem(
                f"connector {self._name}: preview() gave {type(returned).__name__}, expected Preview"
            )
        return returned

    def _examples(self, which: str) -> Examples:
        returned = _try(self._name, lambda: getattr(self._connector, which)())
        fits = isinstance(returned, Examples) and (
            isinstance(returned.x, np.ndarray)
            and isinstance(returned.y, np.ndarray)
            and returned.x.dtype in (np.float32, np.int32)
            and returned.y.dtype == np.int32
            and len(returned.x) == len(returned.y)
        )
        if not fits:
            raise DataProblem(
                f"connector {self._name}: {which}() must give Examples of x, float32 or int32, and y, int32, of one length"
            )
        examples: Examples = returned
        return examples


def _try(name: str, call: Any) -> Any:
    try:
        return call()
    except (DataProblem, MemoryError):
        raise
    except Exception as error:
        raise DataProblem(f"connector {name}: {type(error).__name__}: {error}") from error
