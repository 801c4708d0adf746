"""The folder of a Flower app that runs an experiment, as `flwr run` takes it.

    pyproject.toml    names the two components, and the run configuration with its defaults
    experiment.toml   the resolved experiment
    server_app.py     the ServerApp
    client_app.py     the ClientApp
    …                 modules of the user that the experiment names

Flower sends these files to every node, so all parts of a run work on the same experiment.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import tomlkit

from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.on_flower.possible import require_possible
from coordinator.on_flower.settings import DEFAULTS, EXPERIMENT
from coordinator.output_folders import require_new, undone_if_refused
from edge_client.files import write_durably
from models.user_code import OURS, is_reference

_SERVER_APP = '''\
"""The ServerApp of this Flower app: Fedloop's round engine."""

from pathlib import Path

from coordinator.on_flower.server import make_server_app

app = make_server_app(Path(__file__).parent)
'''

_CLIENT_APP = '''\
"""The ClientApp of this Flower app: trains one client of the experiment."""

from pathlib import Path

from coordinator.on_flower.client import make_client_app

app = make_client_app(Path(__file__).parent)
'''


def write(experiment: Experiment, folder: Path, out: Path, code_folder: Path) -> list[str]:
    """Writes the app into a new or empty folder; returns the names of its files.

    Args:
        out: folder of the run on the machine of the ServerApp, as the run configuration's default.
        code_folder: where the modules are that the experiment names.

    Raises:
        UserError: the experiment cannot run on Flower, or `folder` is not empty or cannot be written.
    """
    # As Flower's nodes train; so `fedloop simulate` of the app's experiment.toml gives the same bits.
    one_by_one = experiment.simulation.model_copy(update={"engine": "pool"})
    experiment = experiment.model_copy(update={"simulation": one_by_one})
    require_possible(experiment)
    require_new(folder)
    sources = _find_modules(experiment, code_folder)
    files = {
        "pyproject.toml": _pyproject(experiment, out),
        EXPERIMENT: experiment.to_toml(),
        "server_app.py": _SERVER_APP,
        "client_app.py": _CLIENT_APP,
    }
    try:
        with undone_if_refused(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for source in sources:
                _copy(source, folder / source.name)
            for name, text in files.items():
                write_durably(folder / name, text.encode())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    return [*files, *(source.name for source in sources)]


def _pyproject(experiment: Experiment, out: Path) -> str:
    app = {
        "publisher": "fedloop",
        "components": {"serverapp": "server_app:app", "clientapp": "client_app:app"},
        "config": {**DEFAULTS, "out": str(out)},
    }
    document = {
        "project": {
            "name": _project_name(experiment.name),
            "version": "1.0.0",
            "description": "A federated experiment of Fedloop.",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {"flwr": {"app": app}},
    }
    return tomlkit.dumps(document)


def _project_name(name: str) -> str:
    """A name that Flower accepts: a letter, then letters, digits and hyphens."""
    return "fedloop-" + (re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") or "experiment")[:40].strip("-")


def _find_modules(experiment: Experiment, code_folder: Path) -> list[Path]:
    """Files and packages of the user that the experiment names; installed ones are installed on every machine."""
    named = (experiment.data.dataset, experiment.model.name or "", experiment.strategy.name)
    tops = {name.partition(":")[0].partition(".")[0] for name in named if is_reference(name)}
    found = []
    for top in sorted(tops):
        if top in (*OURS, "server_app", "client_app"):
            raise UserError(
                f"the experiment names the module {top!r}, whose name a Flower app of ours needs; rename it"
            )
        for path in (code_folder / f"{top}.py", code_folder / top):
            if path.exists():
                found.append(path)
                break
    return found


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    else:
        shutil.copyfile(source, target)
