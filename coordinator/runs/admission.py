"""Admission: which code, files and versions an experiment from the operator API may name.

A token for the API is not an account on the coordinator's machine. So such an experiment may only name models of the catalog,
entry points that the administrator installed, code on the list of `--allow-code`, versions of the registry, and regular
files in the data folders (`--data-dir`, `--allow-path`). Local commands run as their user and are not restricted.

Every route that takes an experiment calls `admit`; a resumed run calls `require_code`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

from coordinator.context.services import Services
from coordinator.db.registry import VersionRow
from coordinator.errors import Refusal, UserError
from coordinator.experiments import experiment as experiments
from coordinator.experiments.schema import Experiment
from coordinator.model_references import PARAMS, is_version, parse_reference
from coordinator.registry import registration
from coordinator.runs.initial_params import join_files
from coordinator.settings import Settings
from edge_client.files import READ_LIMIT_BYTES, is_beneath, open_beneath, read_all, read_regular
from models import user_code
from models.datasets import names
from strategies.own import GROUP, is_flower, is_shipped_by_flower, split_flower

MODEL_LIMIT_BYTES = 64 * 1024**3
"""Largest file of a model that is not read into memory."""
_MODEL_FILES = (".json", ".safetensors", ".txt")
"""What is read of a model's folder: weights, descriptions, tokenizers."""


@dataclass(frozen=True)
class Checked:
    """An experiment as the operator API would take it.

    Attributes:
        document: as written, with the settings applied.
        experiment: with every default filled in; None if a key is invalid.
        problems: every reason why it cannot run, each beginning with its key; empty if it can.
        notices: keys that do not apply to a fleet of devices.
    """

    document: dict[str, Any]
    experiment: Experiment | None
    problems: list[str]
    notices: list[str]


def check(document: Mapping[str, Any], sets: Sequence[str], services: Services) -> Checked:
    """What starting a run of this experiment would say, without starting it.

    Raises:
        UserError: a setting is not of the form key=value.
    """
    changed = experiments.apply_settings(copy.deepcopy(dict(document)), sets)
    experiment, problems = experiments.check(changed, "devices")
    if experiment is None:
        return Checked(changed, None, problems, [])
    for problem in find_problems(experiment, services):
        problems.append(f"model.init: {problem}" if isinstance(problem, Refusal) else str(problem))
    return Checked(changed, experiment, problems, ignored_keys(changed, experiment))


def ignored_keys(document: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """Notices of keys in the document that do not apply to a real fleet."""
    notices = []
    data = document.get("data", {})
    for key in ("partition", "public_samples"):
        if key in data:
            notices.append(f"data.{key} is ignored: devices hold data of their own")
    shares = experiment.federation.runtimes
    if len(set(shares.values())) > 1 and "runtimes" in document.get("federation", {}):
        notices.append(
            f"of federation.runtimes only the names count: allowed are {', '.join(sorted(shares))}"
        )
    if "simulation" in document:
        notices.append("[simulation] is ignored")
    return notices


def admit(experiment: Experiment, services: Services, *, comes_with_model: bool = False) -> Experiment:
    """The experiment with an alias in `model.init` replaced by its version.

    `comes_with_model`: the user's own model came with it as content, so that its names of code and files are not followed.

    Raises:
        UserError: `code_not_allowed`, `path_not_allowed`, `bad_file`, `no_params`; it says what to do.
        Refusal: 404, there is no such version.
    """
    for problem in find_problems(experiment, services, comes_with_model=comes_with_model):
        raise problem
    init = experiment.model.init
    if init is None or not is_version(init):
        return experiment
    pinned = str(_find_version(init, services).id)
    return experiment.model_copy(update={"model": experiment.model.model_copy(update={"init": pinned})})


def find_problems(
    experiment: Experiment, services: Services, *, comes_with_model: bool = False
) -> Iterator[UserError | Refusal]:
    """All reasons why the experiment may not run here, as the errors of `admit`. `comes_with_model`: as there."""
    yield from _code_problems(experiment, services.settings, comes_with_model=comes_with_model)
    for key, path in named_files(experiment):
        if comes_with_model and key.startswith("model."):
            continue
        try:
            open_file(key, path, services.settings).close()
        except UserError as error:
            yield _with_way(error) if key == "model.init" and error.code == "bad_file" else error
    init = experiment.model.init
    if init is not None and is_version(init):
        try:
            _find_version(init, services)
        except (UserError, Refusal) as error:
            yield error


def require_code(experiment: Experiment, settings: Settings, *, comes_with_model: bool = False) -> None:
    """Checks that all code that the experiment names is allowed at present. `comes_with_model`: as for `admit`.

    Raises:
        UserError: `code_not_allowed`.
    """
    for problem in _code_problems(experiment, settings, comes_with_model=comes_with_model):
        raise problem


def _code_problems(
    experiment: Experiment, settings: Settings, *, comes_with_model: bool
) -> Iterator[UserError]:
    model, dataset = experiment.model.name or "", experiment.data.dataset
    if user_code.is_reference(model) and model not in settings.allow_code and not comes_with_model:
        yield _not_allowed(
            "model.name",
            model,
            "; or start the run with `fedloop run` where the code is; or install it, as an entry point of the group "
            "fedloop.models",
        )
    if names.is_code(dataset) and dataset not in settings.allow_code:
        yield _not_allowed("data.dataset", dataset)
    strategy = experiment.strategy.name
    if is_flower(strategy):
        code = ":".join(split_flower(strategy))
        if not is_shipped_by_flower(strategy) and code not in settings.allow_code:
            yield _not_allowed("strategy.name", code)
        return
    if user_code.is_reference(strategy) and strategy not in settings.allow_code:
        yield _not_allowed(
            "strategy.name", strategy, f"; or install it, as an entry point of the group {GROUP}"
        )


def init_params(
    experiment: Experiment, services: Services, *, comes_with_model: bool = False
) -> bytes | None:
    """Contents of the safetensors that `model.init` of an admitted experiment names, as those of one file; None if it names none.

    `comes_with_model`: as for `admit`; a file that it names came as the model's params.

    Raises:
        UserError: the file no longer exists, or is not a regular file.
        Refusal: 404, there is no such version.
    """
    init = experiment.model.init
    if init is None:
        return None
    if is_version(init):
        blobs = [services.blobs.path(blob) for blob in _params_blobs(_find_version(init, services))]
        return read_regular(blobs[0]) if len(blobs) == 1 else join_files(map(read_regular, blobs))
    if comes_with_model:
        return None
    with open_file("model.init", init, services.settings) as file:
        return read_all(file)


def params_file(version: str, services: Services) -> Path:
    """The params of a registered version, such as digits:3 or digits@champion.

    Raises:
        UserError: `no_params`.
        Refusal: 404, there is no such version.
    """
    found = _find_version(version, services)
    blobs = _params_blobs(found)
    if len(blobs) > 1:
        raise UserError(f"model.init: {found.id} is in {len(blobs)} files, expected one", "no_params")
    return services.blobs.path(blobs[0])


def published_files(version: str, services: Services) -> dict[str, Path]:
    """The files of a registered version that is a folder from elsewhere, by their paths in it; empty for any other version.

    Raises:
        UserError: `no_params`.
        Refusal: 404, there is no such version.
    """
    found = _find_version(version, services)
    return {file.path: services.blobs.path(file.sha256) for file in found.files if found.kind == "weights"}


def _not_allowed(key: str, name: str, more: str = "") -> UserError:
    return UserError(
        f"{key} = {name!r} is code on the coordinator's machine, which it runs only where its administrator allows that: "
        f"fedloop serve --allow-code {name}{more}",
        "code_not_allowed",
    )


def named_files(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Keys that name a file, with the file."""
    model, data = experiment.model, experiment.data
    if data.path is not None:
        yield "data.path", data.path
    if model.init is not None and not is_version(model.init):
        yield "model.init", model.init
    if model.name is not None and model.name.endswith(user_code.KERAS_FILE):
        yield "model.name", model.name


def open_file(key: str, path: str, settings: Settings, limit_bytes: int = READ_LIMIT_BYTES) -> BufferedReader:
    """The file that a key names, opened. Raises: UserError: `path_not_allowed`, `bad_file`."""
    folders = settings.folders
    try:
        if not is_beneath(Path(path), folders):
            raise UserError(f"{key} = {path!r} {_explain_folders(folders, key)}", "path_not_allowed")
        return open_beneath(Path(path), folders, limit_bytes)
    except (OSError, ValueError) as error:
        raise _bad_file(key, path, error) from None


def _with_way(error: UserError) -> UserError:
    """The refusal of what is no regular file as `model.init` of a run on devices, with what to do about a folder."""
    return UserError(
        f"{error}; of a folder in Hugging Face's layout make a version: fedloop pretrain import DIR --out NEW, then fedloop "
        "model add NEW --name NAME",
        error.code,
    )


def require_model(key: str, path: str, settings: Settings) -> None:
    """Requires that the file, or the folder with all its files, that a key names may be read.

    A link within a folder must not lead out of the data folders either. Folders are those of a pretraining and in Hugging
    Face's layout.

    Raises:
        UserError: `path_not_allowed`, `bad_file`.
    """
    place, folders = Path(path), settings.folders
    try:
        entries = sorted(place.iterdir()) if is_beneath(place, folders) and place.is_dir() else []
        outside = next((entry.name for entry in entries if not is_beneath(entry, folders)), None)
    except (OSError, ValueError) as error:
        raise _bad_file(key, path, error) from None
    if outside is not None:
        reason = _explain_folders(folders, key)
        raise UserError(f"{key} = {path!r}: {outside} is a link to what {reason}", "path_not_allowed")
    for file in [entry for entry in entries if entry.suffix in _MODEL_FILES] or [place]:
        open_file(key, str(file), settings, MODEL_LIMIT_BYTES).close()


def _bad_file(key: str, path: str, error: OSError | ValueError) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else error
    return UserError(f"{key} = {path!r} on the coordinator's machine: {reason}", "bad_file")


def _explain_folders(folders: tuple[Path, ...], key: str) -> str:
    place = ", ".join(map(str, folders))
    problem = f"lies in none of the folders that this coordinator reads: {place}" if folders else (
        "is a file, and this coordinator reads none that experiments name"
    )  # fmt: skip
    version = "; or register the model and give its version, such as digits:3" if key == "model.init" else ""
    return f"{problem}; its administrator adds folders with fedloop serve --allow-path DIR{version}"


def _find_version(text: str, services: Services) -> VersionRow:
    version = services.database.read(partial(registration.require_version, which=parse_reference(text)))
    _params_blobs(version)
    return version


def _params_blobs(version: VersionRow) -> list[str]:
    """The blobs with the version's params: one, but for imported weights in several files. Raises: UserError: `no_params`."""
    weights = [file for file in version.files if file.path.endswith(".safetensors")]
    if blobs := [file.sha256 for file in weights if file.path == PARAMS or version.kind == "weights"]:
        return blobs
    raise UserError(
        f"model.init: {version.id} is {version.kind} of stage {version.stage} and has no {PARAMS}",
        "no_params",
    )
