"""`fedloop init`: an experiment, a model and data of one's own to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.errors import UserError
from edge_client.files import write_durably

_EXPERIMENT = """\
# An experiment: fedloop simulate experiment.toml
# Every key that is left out has a default; `fedloop docs experiment` lists them all.
name = "mine"
seed = 7

[data]
dataset = "data:load"        # the function `load` in data.py
partition = "dirichlet(0.3)" # how the rows are dealt out to clients; "iid" deals out equal shares

[model]
name = "model:build"         # the function `build` in model.py
hidden = 32                  # further keys are its arguments

[federation]
clients = 10
clients_per_round = 5
rounds = 10
runtimes = { torch = 1 }     # { litert = 1, torch = 1 } also trains clients in LiteRT

[local]
epochs = 2
batch_size = 16
lr = 0.1

[strategy]
name = "fedavg"
"""

_MODEL = '''\
"""The model: a function that returns a torch module."""

from torch import nn


def build(input_shape, classes, hidden=32):
    """`input_shape` and `classes` come from the data, `hidden` from [model] in experiment.toml.

    The module gets rows [batch, *input_shape] and returns logits [batch, classes], without a softmax.
    """
    inputs = 1
    for size in input_shape:
        inputs *= size
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))
'''

_DATA = '''\
"""The data: a function that returns arrays."""

import numpy as np
from sklearn.datasets import load_digits


def load():
    """Rows `x` [rows, ...] as numbers and their classes `y` [rows]. A fifth of the rows is held out for testing.

    Return `site` [rows] too, the name or number of the client that each row belongs to, and set
    data.partition = "natural" to have one client per site. With a parameter `data_dir` it gets --data-dir.
    """
    digits = load_digits()
    return {"x": (digits.images / 16).astype(np.float32), "y": digits.target}
'''

_README = """\
# A federated experiment

    fedloop simulate experiment.toml                        # report, curves and model in runs/
    fedloop simulate experiment.toml --set local.lr=0.05    # one key changed
    fedloop sweep experiment.toml --over local.lr=0.05,0.1 --seeds 3

Run these here: `model:build` and `data:load` are looked up in the working directory.

- `experiment.toml`: everything that a run depends on
- `model.py`: a PyTorch module of your own
- `data.py`: rows of your own; it reads scikit-learn's digits until you change it
"""

_FILES = {"experiment.toml": _EXPERIMENT, "model.py": _MODEL, "data.py": _DATA, "README.md": _README}


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Folder for the files. Default: the working directory.")
    ] = Path(),
) -> None:
    """Write an experiment, a model and a data loader that run, to begin your own from."""
    if there := [name for name in _FILES if (folder / name).exists()]:
        raise UserError(
            f"{folder}: holds {', '.join(there)} already, which would be overwritten; name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in _FILES.items():
            write_durably(folder / name, text.encode())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    here = "" if folder == Path() else f"cd {folder} && "
    typer.echo(f"wrote {', '.join(_FILES)} in {folder}/; run it: {here}fedloop simulate experiment.toml")
