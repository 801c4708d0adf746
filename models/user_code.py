"""Imports and calls users' own modules, without name conflicts with our packages.

Our packages have generic names (`models`, `strategies`). A user who imports their own `models.py` means that
one. While their code is imported and called, our packages are removed from `sys.modules` and their folder
comes first on `sys.path`; afterwards both are restored.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""A reference to user code: `package.module:function`."""

FILE_REFERENCE = re.compile(r"(/.+\.py):([^\W\d]\w*)")
"""A reference to user code in a file, wherever that is: `/folder/file.py:function`."""

ALLOWED_VARIABLE = "FEDLOOP_ALLOWED_CODE"
"""Environment variable: if set, this process loads only the references in it, separated by spaces."""

KERAS_FILE = ".keras"
"""Suffix of a model name that is a file, written by `keras.Model.save`."""

OURS = ("coordinator", "edge_client", "strategies", "models")


class UserCodeError(ValueError):
    """A reference that cannot be resolved; the message gives the reason."""


def is_reference(name: str) -> bool:
    """Whether a model name refers to user code."""
    return ":" in name and not name.endswith(KERAS_FILE)


def is_own(name: str) -> bool:
    """Whether a model's name refers to a user's code or Keras file."""
    return is_reference(name) or name.endswith(KERAS_FILE)


def load(target: str, folder: Path | None = None) -> Callable[..., Any]:
    """The callable `package.module:function`, imported from `folder` (by default the working directory).

    It may also be `/folder/file.py:function`; then the file is executed, and finds other modules beside it first.

    Raises:
        UserCodeError: the module or function does not exist, the import fails, or this process may not run it.
    """
    in_file = FILE_REFERENCE.fullmatch(target)
    if not in_file and not REFERENCE.fullmatch(target):
        raise UserCodeError(f"{target!r} is not of the form package.module:function")
    allowed = os.environ.get(ALLOWED_VARIABLE)
    if allowed is not None and target not in allowed.split():
        raise UserCodeError(f"{target!r} is not among the code that this process may run")
    module_name, _, attribute = target.rpartition(":")
    where = Path(module_name).parent if in_file else folder or Path.cwd()
    with user_modules_first(where):
        try:
            module = _execute(Path(module_name)) if in_file else importlib.import_module(module_name)
        except FileNotFoundError as error:
            raise UserCodeError(f"importing {module_name} failed: {error.filename} does not exist") from error
        except SyntaxError as error:
            raise UserCodeError(
                f"importing {module_name} failed at {error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
            ) from error
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                raise UserCodeError(
                    f"no module {module_name!r} in {where} or among the installed packages; "
                    "run from the folder that holds it, or install it"
                ) from error
            raise UserCodeError(
                f"{module_name} needs {error.name!r}, which is not installed{error_location(error)}"
            ) from error
        except Exception as error:
            raise UserCodeError(
                f"importing {module_name} failed{error_location(error)}: {type(error).__name__}: {error}"
            ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = ", ".join(name for name, value in vars(module).items() if callable(value) and name[0] != "_")
        raise UserCodeError(f"{module_name} has no function {attribute!r}; it has: {known or 'none'}")

    def call(*args: Any, **kwargs: Any) -> Any:
        with user_modules_first(where):
            return function(*args, **kwargs)

    # `inspect.signature` then shows the user's parameters: callers pass only those.
    return functools.update_wrapper(call, function, updated=())


class _Uncached(importlib.machinery.SourceFileLoader):
    """Compiles the file each time: the cache of bytecode takes a file that changed within a second for the old one."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _execute(file: Path) -> ModuleType:
    """A file as a module of its own, executed anew. It is in `sys.modules`, as some decorators need, by its path."""
    name = f"fedloop_{file.stem}_{abs(hash(str(file)))}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_Uncached(name, str(file)))
    assert spec is not None and spec.loader is not None  # the file's name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def error_location(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """` at FILE, line N`: the innermost line of the user's own files in the traceback of `error`; empty if there is none.

    Files of Python, of installed packages and ours do not count, except the one that defines `function`.
    """
    own = _definition(function)[0] if function is not None else None
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == own or _is_user_file(frame.filename)
    ]
    return f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def definition_location(function: Callable[..., Any]) -> str:
    """` (FILE, line N)`, where `function` is defined; empty if unknown."""
    file, line = _definition(function)
    return f" ({file}, line {line})" if file else ""


def _definition(function: Callable[..., Any]) -> tuple[str | None, int | None]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else (None, None)


def _is_user_file(file: str) -> bool:
    path, here = Path(file), Path(__file__).resolve().parents[1]
    others = [Path(found) for key in ("stdlib", "purelib", "platlib") if (found := sysconfig.get_path(key))]
    return path.is_file() and not any(
        path.is_relative_to(folder) for folder in (*others, *(here / name for name in OURS))
    )


@contextmanager
def user_modules_first(folder: Path) -> Iterator[None]:
    """Makes imports of our top-level names find the user's modules, from `folder` first."""
    hidden = _remove_modules(_is_ours)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        _remove_modules(_is_ours)
        sys.modules.update(hidden)
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _is_ours(name: str) -> bool:
    return name.split(".", 1)[0] in OURS


def _remove_modules(which: Callable[[str], bool]) -> dict[str, ModuleType]:
    removed = {name: module for name, module in sys.modules.items() if which(name)}
    for name in removed:
        del sys.modules[name]
    return removed
