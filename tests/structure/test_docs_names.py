"""The pages name files and functions that exist; docs/one-round.md counts the files that one update passes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.structure.measure import PACKAGES, ROOT

# Budgets may only be lowered.
MAX_FILES_REAL_FLEET = 18
MAX_FILES_SIMULATION = 8

ONE_ROUND = (ROOT / "docs" / "one-round.md").read_text("utf-8")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_in_the_page_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    names = re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.(?!py\b)\w+)+)[`(]", text)
    files = re.findall(rf"\b((?:{'|'.join(PACKAGES)}|tests)/[\w/]+\.py)\b", text)
    assert [name for name in names if not _exists(name)] == []
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_one_update_passes_files_within_budget() -> None:
    rows = [line.split("|")[2:4] for line in ONE_ROUND.splitlines() if re.match(r"\| .+ \| .*\.py`", line)]
    fleet, simulation = ([file for row in rows for file in re.findall(r"`(.+?)`", row[at])] for at in (0, 1))
    assert len(set(fleet)) == len(fleet) <= MAX_FILES_REAL_FLEET
    assert len(set(simulation)) == len(simulation) <= MAX_FILES_SIMULATION
    on_device = fleet.index("coordinator/device_api/uploads.py")
    counted = f"passes {len(fleet)} files on a real fleet, {on_device} of them on the device, and {len(simulation)} in a simulation"
    assert counted in " ".join(ONE_ROUND.split())


def _exists(name: str) -> bool:
    """Whether a dotted name is a folder, a module, or one's function, class, method, field or import."""
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:at])
        if path.is_dir() or path.with_suffix(".py").is_file():
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            return _defines(ast.parse(file.read_text("utf-8")), parts[at:])
    return False


def _defines(node: ast.Module | ast.ClassDef, names: list[str]) -> bool:
    if not names:
        return True
    for each in node.body:
        if names[0] in _defined(each):
            return not names[1:] or (isinstance(each, ast.ClassDef) and _defines(each, names[1:]))
    return False


def _defined(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.ImportFrom(names=aliases):
            return {alias.asname or alias.name for alias in aliases}
    return set()
