"""The experiment file: one TOML document that runs in simulation and on a real fleet.

`load(path, sets)` reads the file, applies `--set`, checks everything and reports every bad value at once.
The result is complete: every key has a value, so `to_toml` records the whole experiment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coordinator.document_checks import to_user_error, validate
from coordinator.errors import UserError
from coordinator.experiments import device_schema, strategy_choice
from coordinator.experiments.defaults import with_defaults
from coordinator.experiments.privacy import checks as privacy
from coordinator.experiments.schema import Experiment, FleetKind
from coordinator.experiments.settings import apply_settings as apply_settings
from coordinator.experiments.validation import find_problems
from coordinator.json_values import flatten
from coordinator.model_references import is_version
from coordinator.toml_files import absolute, beside, read_toml
from models.hugging_face import config as hugging_face
from models.options import JobError
from models.user_code import KERAS_FILE

_AFFECTED_KEYS = {
    "data.dataset": ("data", "model", "federation.clients"),
    "data.partition": ("federation.clients",),
    "data.site": ("federation.clients",),
    "model.name": ("model", "federation.runtimes"),
    "strategy.name": ("strategy", "server_data"),
}
"""Keys whose default or meaning depends on a key."""

_PATHS = (
    ("data", "path"),
    ("data", "schema"),
    ("server_data", "path"),
    ("model", "init"),
    ("model", "name"),
    ("simulation", "profiles"),
    ("simulation", "replay"),
)
"""Keys that may name a file."""

MAY_CHANGE = ("federation.rounds", "simulation.workers")
"""Keys that may change when a simulation is resumed, because no committed round depends on them."""


def load(path: Path | None, sets: Iterable[str] = ()) -> Experiment:
    """The experiment of a file (or all defaults) after `--set key=value` settings.

    Raises:
        UserError: naming the file, every bad key with its value, and what was expected.
    """
    return resolve(with_start(read_document(path, sets)), str(path) if path else "experiment")


def read_document(
    path: Path | None, sets: Iterable[str] = (), fleet: FleetKind = "simulated"
) -> dict[str, Any]:
    """The document of a file (empty without one) after `--set` settings, not yet checked.

    Relative paths in the file follow the file's folder and become absolute; those of `--set` follow the working directory.
    """
    document = {} if path is None else follow_folder(read_toml(path), path, fleet)
    return device_schema.inline(apply_settings(document, sets))


def with_start(document: Mapping[str, Any]) -> dict[str, Any]:
    """As `with_published_model`, unless the document names a model of another kind, such as code that has the folder's own names."""
    model = document.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    is_ours = isinstance(model, dict) and model.get("name", "gpt") in hugging_face.COUNTERPARTS
    if not is_ours or not isinstance(init, str) or not hugging_face.is_covered(Path(absolute(init))):
        return dict(document)
    return with_published_model(document)


def with_published_model(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the model of the Hugging Face folder that `model.init` names, if it names one.

    Keys of the document go before those of the folder. Reads config.json of the folder.

    Raises:
        UserError: the folder describes a model that ours cannot be, or another one than the document names.
    """
    model = document.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(init, str):
        return dict(document)
    folder = Path(absolute(init))
    if not hugging_face.is_folder(folder):
        return dict(document)
    try:
        found = hugging_face.read(folder)
    except JobError as error:
        raise UserError(f"model.init = {init!r}: {error}") from None
    require_name(model, init, found.name)
    return {**document, "model": {**found.options, "name": found.name, **model}}


def require_name(model: Mapping[str, Any], init: str, name: str) -> None:
    """Requires that a table `model`, if it names one, names the model that the folder `init` has. Raises: UserError."""
    if model.get("name", name) != name:
        raise UserError(
            f"model.name = {model['name']!r}, but model.init = {init!r} is a {name}; leave the name out"
        )


def follow_folder(document: dict[str, Any], file: Path, fleet: FleetKind = "simulated") -> dict[str, Any]:
    """Makes the paths that a document names absolute, in place: relative ones follow the folder of `file`."""
    for table, key in _PATHS:
        section = document.get(table)
        if not isinstance(section, dict) or not isinstance(value := section.get(key), str) or not value:
            continue
        if (key == "name" and not value.endswith(KERAS_FILE)) or (
            key == "init" and fleet == "devices" and is_version(value)
        ):
            continue
        section[key] = beside(file, value)
    return document


def resolve(
    document: Mapping[str, Any], source: str, fleet: FleetKind = "simulated", *, stored: bool = False
) -> Experiment:
    """A checked experiment with every default filled in.

    On a fleet of devices `data.dataset` may be any name that the devices know, if the file describes its rows.
    `stored`: of a run that began earlier; how its table is read stays as it was, whatever the default is now.

    Raises:
        UserError: listing every problem at once; messages call the document `source`.
    """

    experiment, problems = check(document, fleet, stored=stored)
    if experiment is None or problems:
        raise to_user_error(source, problems)
    return experiment


def check(
    document: Mapping[str, Any], fleet: FleetKind, *, stored: bool = False
) -> tuple[Experiment | None, list[str]]:
    """As `resolve`, but every problem is returned; the experiment is None if a key is invalid."""

    def complete(valid: Experiment) -> Experiment:
        return with_defaults(valid, fleet, stored=stored)

    def find_all(valid: Experiment) -> Iterator[str]:
        completed = complete(valid)
        yield from find_problems(completed, fleet)
        yield from strategy_choice.find_problems(completed, fleet)
        yield from privacy.find_problems(completed, fleet)

    experiment, problems = validate(Experiment, document, find_all, _AFFECTED_KEYS)
    return None if experiment is None else complete(experiment), problems


def read_finished(path: Path) -> Experiment:
    """The experiment of a run, which was checked when the run began, be it a simulation or on devices.

    Raises:
        UserError: the file is no experiment.
    """
    experiment, problems = check(read_toml(path), "devices", stored=True)
    if experiment is None:
        raise to_user_error(str(path), problems)
    return experiment


def change(before: Experiment, source: str, sets: Iterable[str]) -> Experiment:
    """The resolved experiment of a simulation after `--set` settings on its resume.

    Raises:
        UserError: naming every key that may not change.
    """
    requested = apply_settings(before.model_dump(mode="json", exclude_none=True), sets)
    after = resolve(requested, source, stored=True)
    old, new = (flatten(each.model_dump(mode="json", exclude_none=True)) for each in (before, after))
    refused = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in MAY_CHANGE]
    fixed = after.privacy.epsilon is not None or after.privacy.mechanism == "ftrl"
    if fixed and after.federation.rounds != before.federation.rounds:
        # Its noise was computed for so many rounds; the committed ones have it.
        refused.append("federation.rounds")
    if refused:
        raise UserError(
            "\n  ".join(
                [f"{source}: cannot change when a run is resumed:"]
                + [f"{key} was {old.get(key)!r}, requested is {new.get(key)!r}" for key in refused]
                + [f"keys that can: {' and '.join(MAY_CHANGE)}; for all others, start a new run"]
            )
        )
    return after
