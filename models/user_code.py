"""A user's own module, imported without our top-level names in its way.

Our packages have generic names (`models`, `strategies`). A user who has a `models.py` of their own and
imports it means that one. While their code is imported and called, our packages are taken out of
`sys.modules` and their folder comes first on `sys.path`; afterwards everything is put back.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""How code of a user is named: `package.module:function`."""

ALLOWED_VARIABLE = "FEDLOOP_ALLOWED_CODE"
"""Environment variable: where it is set, this process loads the references in it, separated by spaces, and no other."""

KERAS_FILE = ".keras"
"""Ends the name of a model that is a file, written by `keras.Model.save`."""

OURS = ("coordinator", "edge_client", "strategies", "models")


class UserCodeError(ValueError):
    """A name like `package.module:function` that cannot be resolved, with the reason."""


def is_reference(name: str) -> bool:
    """Whether a model of this name is code of a user, to be imported."""
    return ":" in name and not name.endswith(KERAS_FILE)


def load(target: str, folder: Path | None = None) -> Callable[..., Any]:
    """The callable `package.module:function`, found from `folder` (the working directory by default).

    Raises:
        UserCodeError: no such module or function, the module fails on import, or it is not allowed here.
    """
    if not REFERENCE.fullmatch(target):
        raise UserCodeError(f"{target!r} is not of the form package.module:function")
    allowed = os.environ.get(ALLOWED_VARIABLE)
    if allowed is not None and target not in allowed.split():
        raise UserCodeError(f"{target!r} is not among the code that this process may run")
    module_name, _, attribute = target.partition(":")
    where = folder or Path.cwd()
    with own_names(where):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                raise UserCodeError(
                    f"no module {module_name!r} in {where} or among the installed packages; "
                    "run from the folder that holds it, or install it"
                ) from error
            raise UserCodeError(f"{module_name} needs {error.name!r}, which is not installed") from error
        except Exception as error:
            raise UserCodeError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = ", ".join(name for name, value in vars(module).items() if callable(value) and name[0] != "_")
        raise UserCodeError(f"{module_name} has no function {attribute!r}; it has: {known or 'none'}")

    def call(*args: Any, **kwargs: Any) -> Any:
        with own_names(where):
            return function(*args, **kwargs)

    # `inspect.signature` sees through to the user's function: callers offer only what it takes.
    return functools.update_wrapper(call, function, updated=())


@contextmanager
def own_names(folder: Path) -> Iterator[None]:
    """Lets imports of our top-level names find the user's, from `folder` first."""
    hidden = _take(_is_ours)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        _take(_is_ours)
        sys.modules.update(hidden)
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _is_ours(name: str) -> bool:
    return name.split(".", 1)[0] in OURS


def _take(which: Callable[[str], bool]) -> dict[str, ModuleType]:
    taken = {name: module for name, module in sys.modules.items() if which(name)}
    for name in taken:
        del sys.modules[name]
    return taken
