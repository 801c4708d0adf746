"""Loads the ServerApp or the ClientApp of an app, whose modules may have the names of ours.

`models`, `strategies`, `coordinator` and `edge_client` are likely names in an app. A process that loads one needs nothing more of
ours to import: it forgets our modules, which go on working, and puts the app's folder first.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from coordinator.import_guard import NAMES


class LoadFailed(Exception):
    """A component cannot be loaded; the message names its key in `pyproject.toml` and says why."""


def load(key: str, reference: str, folder: Path, kind: type) -> Any:
    """The object that `reference` (`module:attribute`) names, an instance of `kind`. From now on the names of our packages are the app's.

    Raises:
        LoadFailed: there is no such object, or importing it failed; then the traceback is on standard error.
    """
    _release_names()
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))
    where = f"tool.flwr.app.components.{key} = {reference!r}"
    name, _, attributes = reference.partition(":")
    try:
        loaded: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            traceback.print_exc()
            raise LoadFailed(f"{where}: {describe(error)}") from None
        raise LoadFailed(f"{where}: there is no module {error.name!r} in {folder}") from None
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise LoadFailed(f"{where}: {describe(error)}") from None
    for attribute in attributes.split("."):
        if not hasattr(loaded, attribute):
            raise LoadFailed(f"{where}: {name} has no {attribute!r}")
        loaded = getattr(loaded, attribute)
    if not isinstance(loaded, kind):
        raise LoadFailed(f"{where}: expected a {kind.__name__}, found a {type(loaded).__name__}")
    return loaded


def describe(error: BaseException) -> str:
    """An error in one line, with the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if message else ''}{message}{at}"


def _release_names() -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in NAMES:
            del sys.modules[name]
    # Our program is no module of the app's either; `multiprocessing` would run it again in the processes that it spawns.
    sys.modules["__main__"] = ModuleType("__main__")
