"""Sizes and imports of the packages, read from their source without executing it."""

from __future__ import annotations

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PACKAGES = ("coordinator", "edge_client", "models", "strategies")
_MIGRATIONS = "coordinator.db.migrations"


@dataclass(frozen=True)
class Sized:
    """A module or a function and its number of lines, blank lines and docstrings included."""

    name: str
    lines: int


@dataclass(frozen=True)
class Package:
    """`modules` and `functions` are sorted, longest first. `chain` is the longest chain of imports, from its top."""

    name: str
    modules: list[Sized]
    functions: list[Sized]
    folders: Counter[str]
    chain: list[str]

    @property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules)

    def median_module(self) -> float:
        return statistics.median(module.lines for module in self.modules if module.lines > 1)

    def median_function(self) -> float:
        return statistics.median(function.lines for function in self.functions)


def packages() -> list[Package]:
    """All four packages. Their chains may continue in another package."""
    graph = import_graph()
    return [_package(name, graph) for name in PACKAGES]


def import_graph() -> grimp.ImportGraph:
    """All imports, also those inside functions, but not those under `TYPE_CHECKING`."""
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def mutual_folders(graph: grimp.ImportGraph) -> list[tuple[str, str, int, int]]:
    """Pairs of folders that import each other, with the number of imports each way.

    A folder and one inside it do not count as a pair: `__init__` may import its submodules.
    """
    counted: Counter[tuple[str, str]] = Counter()
    for importer, imported in _edges(graph):
        one, other = folder_of(importer), folder_of(imported)
        if one != other and not f"{one}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{one}."):
            counted[one, other] += 1
    return sorted(
        (one, other, count, counted[other, one])
        for (one, other), count in counted.items()
        if one < other and (other, one) in counted
    )


def import_cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Groups of modules in which each module imports every other one, directly or indirectly."""
    return [sorted(group) for group in _components(graph) if len(group) > 1]


def longest_chain(graph: grimp.ImportGraph, package: str | None = None) -> list[str]:
    """The longest chain of imports that begins in `package`; a cycle counts with all of its modules."""
    groups = _components(graph)
    at = {module: number for number, group in enumerate(groups) for module in group}
    best: list[list[str]] = []
    for number, group in enumerate(groups):  # imported groups come first
        below = {
            at[imported] for module in group for imported in graph.find_modules_directly_imported_by(module)
        }
        longest = max((best[other] for other in below - {number}), key=len, default=[])
        best.append([*sorted(group), *longest])
    return max(
        (chain for chain in best if package is None or chain[0].split(".")[0] == package), key=len, default=[]
    )


def folder_of(module: str) -> str:
    """`coordinator.db.runs` -> `coordinator.db`; an `__init__` belongs to its own folder."""
    return module if _file(module).name == "__init__.py" else module.rpartition(".")[0]


def _package(name: str, graph: grimp.ImportGraph) -> Package:
    files = sorted((ROOT / name).rglob("*.py"))
    sources = {file: file.read_text("utf-8") for file in files}
    modules = [Sized(_name(file), len(text.splitlines())) for file, text in sources.items()]
    functions = [each for file, text in sources.items() for each in _functions(_name(file), text)]
    folders: Counter[str] = Counter()
    for file in files:
        if file.name != "__init__.py":
            folders[_name(file).rpartition(".")[0]] += 1
    return Package(
        name,
        sorted(modules, key=lambda each: -each.lines),
        sorted(functions, key=lambda each: -each.lines),
        folders,
        longest_chain(graph, name),
    )


def _functions(module: str, text: str) -> Iterator[Sized]:
    if module.startswith(_MIGRATIONS):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Sized(f"{module}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)


def _edges(graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            yield importer, imported


def _components(graph: grimp.ImportGraph) -> list[list[str]]:
    """Strongly connected components, imported ones before their importers (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    components: list[list[str]] = []
    imports: dict[str, list[str]] = defaultdict(list)
    for importer, imported in _edges(graph):
        imports[importer].append(imported)

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        on_stack.add(module)
        for imported in sorted(imports[module]):
            if imported not in number:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in on_stack:
                low[module] = min(low[module], number[imported])
        if low[module] == number[module]:
            group = []
            while not group or group[-1] != module:
                group.append(stack.pop())
                on_stack.discard(group[-1])
            components.append(group)

    for module in sorted(graph.modules):
        if module not in number:
            visit(module)
    return components


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file(module: str) -> Path:
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
