"""The product keeps its structure: docs/architecture.md is true, imports point one way, sizes stay within budgets."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import grimp
import pytest

from tests.structure.measure import (
    PACKAGES,
    ROOT,
    Package,
    folder_of,
    import_cycles,
    import_graph,
    mutual_folders,
    packages,
)

# Budgets may only be lowered: when the product improves, lower them to the new figure.
MAX_MODULES_IN_A_FOLDER = 20
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CHAIN_MODULES = 13
FEATURES = 20

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
MAP = re.findall(r"^\| `([\w/]+)/` \| (.+) \|$", PAGE, re.MULTILINE)
"""Folder and sentence of each row, from low to high."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return import_graph()


@pytest.fixture(scope="module")
def measured() -> list[Package]:
    return packages()


def test_architecture_describes_every_folder_once() -> None:
    assert sorted(folder for folder, _ in MAP) == sorted(_folders_with_modules())


def test_architecture_describes_each_folder_in_one_sentence() -> None:
    wrong = [folder for folder, sentence in MAP if not re.fullmatch(r"[A-Z][^|]*\w.*\.", sentence)]
    assert wrong == []
    assert [folder for folder, sentence in MAP if re.search(r"\. [A-Z]", sentence)] == []


def test_each_docstring_agrees_with_architecture() -> None:
    different = {
        folder: (sentence, _docstring_of(folder)) for folder, sentence in MAP if _has_docstring(folder)
    }
    assert {folder: both for folder, both in different.items() if both[0] != both[1]} == {}


def test_architecture_names_only_folders_that_exist() -> None:
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]*)`", PAGE)
    assert len(named) > len(MAP)
    assert [name for name in named if not (ROOT / name).is_dir()] == []


def test_architecture_finds_a_folder_for_each_feature() -> None:
    features = re.findall(r"^\| (?!`)(.+) \| `([\w/]+)/` \|$", PAGE, re.MULTILINE)
    assert len({feature for feature, _ in features}) == len(features) >= FEATURES
    assert {folder for _, folder in features} <= {folder for folder, _ in MAP}


def test_modules_import_only_from_folders_listed_earlier(graph: grimp.ImportGraph) -> None:
    level = {folder.replace("/", "."): number for number, (folder, _) in enumerate(MAP)}
    upwards = [
        f"{importer} imports {imported}"
        for importer in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if not _nested(folder_of(importer), folder_of(imported))
        and level[folder_of(importer)] < level[folder_of(imported)]
    ]
    assert upwards == []


def test_no_two_folders_import_each_other(graph: grimp.ImportGraph) -> None:
    assert mutual_folders(graph) == []


def test_there_are_no_import_cycles(graph: grimp.ImportGraph) -> None:
    assert import_cycles(graph) == []


def test_no_folder_is_crowded(measured: list[Package]) -> None:
    counts = {folder: count for package in measured for folder, count in package.folders.items()}
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES_IN_A_FOLDER} == {}


def test_no_module_is_over_budget(measured: list[Package]) -> None:
    over = [module for package in measured for module in package.modules if module.lines > MAX_MODULE_LINES]
    assert over == []


def test_no_function_is_over_budget(measured: list[Package]) -> None:
    over = [each for package in measured for each in package.functions if each.lines > MAX_FUNCTION_LINES]
    assert over == []


def test_no_chain_of_imports_is_over_budget(measured: list[Package]) -> None:
    assert [package.chain for package in measured if len(package.chain) > MAX_CHAIN_MODULES] == []


def test_private_parts_of_flower_are_imported_in_one_module() -> None:
    public = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
    private = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in _imported(ast.parse(path.read_text("utf-8")))
        if name.split(".")[0] == "flwr" and name not in public
    }
    assert private == {"coordinator/flower_internals.py"}


def _imported(tree: ast.Module) -> set[str]:
    """Modules that a module imports by their absolute names."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def _folders_with_modules() -> set[str]:
    modules = (
        path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path.name != "__init__.py"
    )
    return {path.parent.relative_to(ROOT).as_posix() for path in modules}


def _has_docstring(folder: str) -> bool:
    """False only for Alembic's `versions`, which is not a package."""
    return _init_file(folder).exists()


def _docstring_of(folder: str) -> str:
    return (ast.get_docstring(ast.parse(_init_file(folder).read_text("utf-8"))) or "").partition("\n")[0]


def _init_file(folder: str) -> Path:
    return ROOT / folder / "__init__.py"


def _nested(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
