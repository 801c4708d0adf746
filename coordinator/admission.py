"""Which code, files and versions an experiment may name that came over the operator API.

A token for the API is not an account on the coordinator's machine. So of an experiment that came this way only these are
resolved: models of the catalog, entry points that the administrator installed, code on the list of `--allow-code`, versions
of the registry, and regular files in the data folders (`--data-dir`, `--allow-path`). Local commands are their user's own
and are not asked.

Every route that takes an experiment goes through `admit`, and a run that is taken up again through `require_code`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path

from coordinator.db.registry import VersionRow
from coordinator.errors import UserError
from coordinator.experiment import Experiment
from coordinator.registry import register
from coordinator.registry.kinds import PARAMS
from coordinator.registry.references import is_version, reference
from coordinator.services import Services
from coordinator.settings import Settings
from edge_client.files import is_beneath, open_beneath, read_all, read_regular
from models import user_code
from models.datasets import sources


def admit(experiment: Experiment, services: Services) -> Experiment:
    """The experiment as this coordinator carries it out: an alias of a version in it is that version from now on.

    Raises:
        UserError: `code_not_allowed`, `path_not_allowed`, `bad_file`, `no_params`; it says what to do.
        Refusal: 404, there is no such version.
    """
    require_code(experiment, services.settings)
    for key, path in _files(experiment):
        _require_file(key, path, services.settings)
    init = experiment.model.init
    if init is None or not is_version(init):
        return experiment
    pinned = str(_version(init, services).id)
    return experiment.model_copy(update={"model": experiment.model.model_copy(update={"init": pinned})})


def require_code(experiment: Experiment, settings: Settings) -> None:
    """Lets an experiment pass whose code, if it names any, is allowed by now.

    Raises:
        UserError: `code_not_allowed`.
    """
    model, dataset = experiment.model.name or "", experiment.data.dataset
    if user_code.is_reference(model) and model not in settings.allow_code:
        raise _not_allowed(
            "model.name", model, "; or install it, as an entry point of the group fedloop.models"
        )
    if sources.is_code(dataset) and dataset not in settings.allow_code:
        raise _not_allowed("data.dataset", dataset)


def init_params(experiment: Experiment, services: Services) -> bytes | None:
    """The safetensors file that `model.init` names, of an experiment that was admitted; None where it names none.

    Raises:
        UserError: the file is no longer there, or is something else.
        Refusal: 404, there is no such version.
    """
    init = experiment.model.init
    if init is None:
        return None
    if is_version(init):
        return read_regular(services.blobs.path(_params_of(_version(init, services))))
    with _opened("model.init", init, services.settings) as file:
        return read_all(file)


def _not_allowed(key: str, name: str, more: str = "") -> UserError:
    return UserError(
        f"{key} = {name!r} is code on the coordinator's machine, which it runs only where its administrator allows that: "
        f"fedloop serve --allow-code {name}{more}",
        "code_not_allowed",
    )


def _files(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Keys that name a file, and the file."""
    model, data = experiment.model, experiment.data
    if data.path is not None:
        yield "data.path", data.path
    if model.init is not None and not is_version(model.init):
        yield "model.init", model.init
    if model.name is not None and model.name.endswith(user_code.KERAS_FILE):
        yield "model.name", model.name


def _require_file(key: str, path: str, settings: Settings) -> None:
    _opened(key, path, settings).close()


def _opened(key: str, path: str, settings: Settings) -> BufferedReader:
    folders = settings.folders
    try:
        if not is_beneath(Path(path), folders):
            raise UserError(f"{key} = {path!r} {_elsewhere(folders, key)}", "path_not_allowed")
        return open_beneath(Path(path), folders)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{key} = {path!r} on the coordinator's machine: {reason}", "bad_file") from None


def _elsewhere(folders: tuple[Path, ...], key: str) -> str:
    place = ", ".join(map(str, folders))
    said = f"lies in none of the folders that this coordinator reads: {place}" if folders else (
        "is a file, and this coordinator reads none that experiments name"
    )  # fmt: skip
    version = "; or register the model and give its version, such as digits:3" if key == "model.init" else ""
    return f"{said}; its administrator adds folders with fedloop serve --allow-path DIR{version}"


def _version(text: str, services: Services) -> VersionRow:
    found = services.database.read(partial(register.found, which=reference(text)))
    _params_of(found)
    return found


def _params_of(version: VersionRow) -> str:
    """The blob of the version's params. Raises: UserError: `no_params`."""
    for file in version.files:
        if file.path == PARAMS:
            return file.sha256
    raise UserError(
        f"model.init: {version.id} is {version.kind} of stage {version.stage} and has no {PARAMS}",
        "no_params",
    )
