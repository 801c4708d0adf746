"""The notebook of the docs, executed in a real kernel: model and data as objects, a cell run twice, plot, predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "first-federation.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_a_cell_can_be_run_again(tmp_path: Path) -> None:
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    notebook.cells.append(nbformat.v4.new_code_cell("import sys; 'pickle' in vars(sys.modules['fedloop'])"))  # type: ignore[no-untyped-call]
    at = {cell.source.strip().splitlines()[-1]: index for index, cell in enumerate(notebook.cells)}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        simulated = at["result"]
        first = shown(notebook.cells[simulated])
        client.execute_cell(notebook.cells[simulated], simulated)  # as a person would
        again = shown(notebook.cells[simulated])
    assert first != again and first.partition(", rounds")[2] == again.partition(", rounds")[2]
    assert first.startswith("Result(out='runs/data-") and len(list((tmp_path / "runs").iterdir())) == 3
    printed = "".join(text(output) for output in notebook.cells[simulated].outputs)
    assert "round 5/5" in printed and "building the model" in printed
    pictures = [
        output for output in notebook.cells[at["result.plot()"]].outputs if "image/png" in output.data
    ]
    assert len(pictures) == 1
    labels = shown(notebook.cells[at["labels"]])
    assert any(name in labels for name in ("idle", "running", "worn"))
    before, after = eval_pair(
        shown(notebook.cells[at['further.report["start"]["test_accuracy"], further.accuracy']])
    )
    assert before > 0.8 and after > 0.8


def shown(cell: Any) -> str:
    """The value of the last expression of a cell."""
    return str(cell.outputs[-1].data["text/plain"])


def text(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))


def eval_pair(shown: str) -> tuple[float, float]:
    first, second = shown.strip("()").split(", ")
    return float(first), float(second)
