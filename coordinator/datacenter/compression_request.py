"""What a compression is to do: a pipeline of steps with their options, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.datacenter.compression_pipeline import PIPELINE_KEYS, Pipeline
from coordinator.datacenter.training_data import DataOptions, StartModel, parse_data_options
from coordinator.document_checks import read_table, to_user_error
from coordinator.errors import UserError
from coordinator.experiments.experiment import apply_settings
from coordinator.toml_files import beside, read_toml


@dataclass(frozen=True)
class CompressionRequest:
    """A requested compression.

    Attributes:
        pipeline: the default one if it has no step.
        origin: its name in messages.
        student: of the default pipeline, as `name` and options.
        sets: kind of a step -> options for all steps of that kind.
        data_options: the data set and the model that the command names.
    """

    pipeline: Pipeline
    origin: str
    student: StartModel = field(default_factory=StartModel)
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data_options: DataOptions = field(default_factory=DataOptions)


def parse_request(
    file: Path | None, student: str | None, sets: Sequence[str], data: str | None = None
) -> CompressionRequest:
    """The compression that a command's options request. Raises: UserError: listing every problem at once."""
    origin = "compress" if file is None else str(file)
    document = {} if file is None else read_toml(file)
    if file is not None and not document.get("step"):
        raise UserError(f"{file}: has no step; expected tables [[step]], each with a kind and its options")
    if file is not None:
        _follow_folder(document, file)
    return read_request(document, apply_settings({}, sets), origin, student, data)


def read_request(
    document: Mapping[str, Any],
    settings: dict[str, Any],
    origin: str,
    student: str | None = None,
    data: str | None = None,
) -> CompressionRequest:
    """The compression that a pipeline's document requests, with `settings` over it; messages call the document `origin`.

    Raises:
        UserError: listing every problem at once.
    """
    data_options = parse_data_options(
        data, {key: settings.pop(key) for key in ("data", "model") if key in settings}, origin
    )
    overrides: dict[str, Any] = {key: settings.pop(key) for key in PIPELINE_KEYS if key in settings}
    student_settings = settings.pop("student", {})
    if student is not None:
        student_settings = {
            **(student_settings if isinstance(student_settings, dict) else {}),
            "name": student,
        }
    if student_settings and document.get("step"):
        raise UserError(
            f"--student is for the default pipeline; in {origin} a step of kind distil names the student"
        )
    options = {kind: value for kind, value in settings.items() if isinstance(value, dict)}
    problems = [
        f"{key} is not a known key; known: rows, test_rows, seed, student, data, model, and kinds of steps with an option, such as quantize.precision"
        for key in settings
        if key not in options
    ]
    pipeline = read_table(Pipeline, {**document, **overrides}, problems)
    model = read_table(StartModel, student_settings, problems, "student.")
    if pipeline is None or model is None or problems:
        raise to_user_error(origin, problems)
    return CompressionRequest(pipeline, origin, model, options, data_options)


def _follow_folder(document: dict[str, Any], file: Path) -> None:
    """Makes the folders of teachers absolute, in place: relative ones follow the folder of `file`."""
    steps = document["step"] if isinstance(document["step"], list) else []
    for step in steps:
        if isinstance(step, dict) and isinstance(step.get("teachers"), str):
            folders = [part.strip() for part in step["teachers"].split(",")]
            step["teachers"] = ",".join(beside(file, folder) for folder in folders if folder)
