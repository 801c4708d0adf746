"""The source of a module that defines functions and classes of this process again, in another one.

What other processes can import is imported there. What was defined in a notebook, in a script or inside a function is
copied with its source, together with the functions, classes and plain values that it uses. Nothing is pickled.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import linecache
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


class NotWritable(ValueError):
    """An object that cannot be written down as source; the message says which, why and what to do."""


class Source:
    """The text of a module, which grows by what is added."""

    def __init__(self) -> None:
        self._bound: dict[str, Any] = {}
        self._folders: list[str] = []
        self._imports: list[str] = []
        self._definitions: list[str] = []

    def text(self, end: str) -> str:
        """The whole module; `end`: statements after all that was added."""
        paths = [f"sys.path.append({folder!r})" for folder in self._folders]
        head = ["from __future__ import annotations", "", *(["import sys", "", *paths, ""] if paths else [])]
        return "\n".join([*head, *self._imports, "", *self._definitions, end])

    def refer(self, value: Any) -> str:
        """The name by which the module knows a function or a class, which is added unless it is there."""
        name: str = value.__name__
        for number in range(2, 1000):
            if self._bound.get(name, value) is value:
                break
            name = f"{value.__name__}_{number}"
        self.bind(name, value, f"{value.__name__} is needed")
        return name

    def copy(self, value: Callable[..., Any]) -> None:
        """Adds a function or a class with its source, also if other processes could import it."""
        assert isinstance(value, type | FunctionType)
        self._bound[value.__name__] = value
        self._copy(value.__name__, value, f"{value.__name__} is needed")

    def bind(self, name: str, value: Any, why: str) -> None:
        """Adds a global name. `why`: begins the message if it is not possible.

        Raises:
            NotWritable: the value is no module, function, class or plain value, or its source is not available.
        """
        if name in self._bound:
            if self._bound[name] is value or (is_plain(value) and self._bound[name] == value):
                return
            raise NotWritable(f"{why}: two different objects are called {name!r}; rename one of them")
        self._bound[name] = value
        if isinstance(value, ModuleType):
            self._require_file(value, why)
            self._imports.append(f"import {value.__name__} as {name}")
        elif (place := _importable(value)) is not None:
            module, attribute = place
            self._require_file(sys.modules[module], why)
            self._imports.append(f"from {module} import {attribute} as {name}")
        elif isinstance(value, type | FunctionType):
            self._copy(name, value, why)
        elif is_plain(value):
            self._definitions.append(f"{name} = {value!r}\n")
        else:
            raise NotWritable(
                f"{why}: {name!r} is a {type(value).__name__}, which cannot be written down; make it inside the function "
                "or class that uses it"
            )

    def _copy(self, name: str, value: Any, why: str) -> None:
        if self._bound.setdefault(value.__name__, value) is not value:
            raise NotWritable(
                f"{why}: two different objects are called {value.__name__!r}; rename one of them"
            )
        text = _text(value, why)
        known = _namespace(value)
        for used in dict.fromkeys(_names(text)):
            if used in known and used != value.__name__:
                self.bind(used, known[used], f"{value.__name__} uses it")
        self._definitions.append(text)
        if name != value.__name__:
            self._definitions.append(f"{name} = {value.__name__}\n")

    def _require_file(self, module: ModuleType, why: str) -> None:
        """Lets the other process find a module that is not installed."""
        top = sys.modules[module.__name__.partition(".")[0]]
        file = getattr(top, "__file__", None)
        if top.__name__ == "__main__":
            raise NotWritable(f"{why}: it is the module __main__, which no other process can import")
        if file is None:  # of Python itself, or a package without a file of its own
            return
        root = Path(file).resolve().parent
        root = root.parent if hasattr(top, "__path__") else root
        installed = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
        if str(root) not in self._folders and not any(root.is_relative_to(path) for path in installed):
            self._folders.append(str(root))


def _importable(value: Any) -> tuple[str, str] | None:
    """The module and the attribute from which any process imports this very object; None if there is none."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "_name", None)
    if not isinstance(module, str) or not isinstance(name, str) or "." in name or module == "__main__":
        return None
    found = sys.modules.get(module)
    if found is None or getattr(found, name, None) is not value:
        return None
    return module, name


def is_plain(value: Any) -> bool:
    """Whether its `repr` is a literal that gives it back."""
    try:
        return type(ast.literal_eval(repr(value))) is type(value) and ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _text(value: Any, why: str) -> str:
    """The definition of a function or class, without its indentation."""
    if value.__name__ == "<lambda>":
        raise NotWritable(f"{why}: it is a lambda; define it with `def`")
    try:
        lines = _class_lines(value) if isinstance(value, type) else inspect.getsourcelines(value)[0]
    except (OSError, TypeError, SyntaxError):
        raise NotWritable(
            f"{why}: the source of {value.__name__} is not available; define it in a file or in a cell of the notebook"
        ) from None
    return textwrap.dedent("".join(lines)).rstrip() + "\n"


def _class_lines(kind: type) -> list[str]:
    """The lines of a class, found by one of its methods: in a notebook a class does not know its cell."""
    for method in _methods(kind):
        lines = linecache.getlines(method.co_filename)
        for node in ast.walk(ast.parse("".join(lines))):
            if not isinstance(node, ast.ClassDef) or node.name != kind.__name__:
                continue
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first <= method.co_firstlineno <= (node.end_lineno or first):
                return lines[first - 1 : node.end_lineno]
    return inspect.getsourcelines(kind)[0]


def _methods(kind: type) -> Iterator[CodeType]:
    for value in vars(kind).values():
        function = inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
        if (
            isinstance(function, FunctionType)
            and function.__qualname__ == f"{kind.__qualname__}.{function.__name__}"
        ):
            yield function.__code__


def _namespace(value: Any) -> Mapping[str, Any]:
    """The values that the names in a definition stand for."""
    functions = [value] if isinstance(value, FunctionType) else []
    if isinstance(value, type):
        functions = [each for each in vars(value).values() if isinstance(each, FunctionType)]
    known: dict[str, Any] = {}
    if isinstance(value, type):
        known |= vars(sys.modules[value.__module__])
        known |= {base.__name__: base for base in value.__bases__}
    for function in functions:
        known |= function.__globals__
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                known[name] = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    known.pop("__class__", None)
    return known


def _names(text: str) -> Iterator[str]:
    """The global names that a definition reads, as Python's compiler resolves them; builtins are left out."""
    code = compile(text, "<definition>", "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    for name in _loaded(code):
        if not hasattr(builtins, name) and not name.startswith("__"):
            yield name


def _loaded(code: CodeType) -> Iterator[str]:
    instructions = list(dis.get_instructions(code))
    stored = {each.argval for each in instructions if each.opname == "STORE_NAME"}
    for each in instructions:
        if each.opname == "LOAD_GLOBAL" or (each.opname == "LOAD_NAME" and each.argval not in stored):
            yield each.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant)
