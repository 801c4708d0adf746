"""The training and test data of a job, from its job file.

Arrays `x_train`, `y_train`, `x_test`, `y_test`, mapped into memory; or files of tokens:

    "tokens": {"train": "tokens_train.npy", "test": "tokens_test.npy"}

or a directory of token files (`models.pretrain.data.token_settings`).
`"objective": "masked"` masks tokens for the model to predict, which needs no labels. `"images"` is a table of
`models.pretrain.data.images.Augmentation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from models.job import JobError, JobFile
from models.pretrain.data import held_out, images, token_directory, token_settings, tokens
from models.pretrain.data.batches import Arrays, Source
from models.pretrain.evaluation import require_images
from models.pretrain.training import validation_rows
from models.zoo.spec import ModelSpec

OBJECTIVES = ("labels", "masked")


@dataclass(frozen=True)
class Data:
    """A training set and a test set.

    Attributes:
        validation: rows held out of the training set, as they are: not augmented; None unless requested.
        about: properties of the data that users of the model need, for the result.
    """

    train: Source
    test: Source
    validation: Source | None = None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenFiles:
    """A job's `tokens`: files of a training set and a test set, relative to the job file."""

    train: str
    test: str


def from_job(job: JobFile, spec: ModelSpec, shift: int = 0, *, validate: bool = False) -> Data:
    """The data of `job`, checked against the model; `shift` is the option of that name, which requires images.

    With `validate`, the training set lacks the rows of the validation set: `validation_rows` of the job, drawn from its
    seed.

    Raises:
        JobError: a file is missing, or the model cannot take its contents; names the file and what was expected.
    """
    masked = objective(job, spec) == "masked"
    if "tokens" in job.settings:
        if "images" in job.settings:
            raise JobError(f"{job.path}: has both tokens and images, expected one of them")
        if shift:
            raise JobError(f"{job.path}: options.shift is {shift}, but tokens are no images; use 0")
        data = _tokens(job, spec, masked)
    else:
        data = _arrays(job, spec, masked, shift)
    plain = data.train
    if "images" in job.settings:
        data, plain = _images(job, data)
    if masked:
        train, test, plain = (
            tokens.Masked(source, spec.classes, spec.mask_token) for source in (data.train, data.test, plain)
        )
        data = replace(data, train=train, test=test)
    return _hold_out(job, data, plain) if validate else data


def _hold_out(job: JobFile, data: Data, plain: Source) -> Data:
    """`plain`: the training set without augmentation."""
    requested = int(job.number("validation_rows", 0, 0, 1_000_000_000))
    count = validation_rows(requested, len(plain))
    if count >= len(plain):
        raise JobError(
            f"{job.path}: validation_rows is {requested}, expected fewer than the {len(plain)} rows of the training set"
        )
    rows = held_out.draw(len(plain), count, np.random.default_rng([job.seed, 2]))
    return replace(data, train=held_out.Rest(data.train, rows), validation=held_out.Part(plain, rows))


def objective(job: JobFile, spec: ModelSpec) -> str:
    """`labels` or `masked`, as the job says if the model supports it; the model's own by default."""
    value = job.settings.get("objective", "masked" if spec.masked else "labels")
    if value not in OBJECTIVES:
        raise JobError(f"{job.path}: objective is {value!r}, expected one of {', '.join(OBJECTIVES)}")
    if (
        value == "masked"
        and not spec.masked
        and (spec.task != "next_token" or spec.tokens != spec.classes + 1)
    ):
        raise JobError(
            f"{job.path}: objective is 'masked', but model {spec.name!r} has no mask token and a label for every "
            'token; use "bert" with options {"objective": "masked"}'
        )
    if value == "labels" and spec.masked:
        raise JobError(
            f"{job.path}: objective is 'labels', but model {spec.name!r} finds hidden tokens: it sees the tokens after "
            "each, and would only copy its labels; expected 'masked', or a model without options.objective"
        )
    return str(value)


def _tokens(job: JobFile, spec: ModelSpec, masked: bool) -> Data:
    if spec.task != "next_token":
        raise JobError(f"{job.path}: tokens is given, but model {spec.name!r} does not predict tokens")
    ordinary = spec.classes if masked else min(spec.tokens, spec.classes)
    if token_settings.names_directory(job):
        return Data(*token_directory.load(job, spec.input_shape[0], ordinary))
    files = job.table("tokens", TokenFiles)
    assert files is not None
    train, test = (
        tokens.load(job.file("tokens", name), spec.input_shape[0], ordinary)
        for name in (files.train, files.test)
    )
    return Data(train, test)


def _arrays(job: JobFile, spec: ModelSpec, masked: bool, shift: int) -> Data:
    def part(name: str) -> Arrays:
        x = job.rows(f"x_{name}", spec, mapped=True)
        if shift:
            require_images(x, f"options.shift is {shift}", job.path)
        # masked tokens are their own labels, so a text without labels is enough
        return Arrays(x, np.zeros(len(x), np.int32) if masked else job.labels(f"y_{name}", spec, x))

    return Data(part("train"), part("test"))


def _images(job: JobFile, data: Data) -> tuple[Data, Source]:
    """With augmented images, and the training set without."""
    augmentation = job.table("images", images.Augmentation) or images.Augmentation()
    train, test, about = data.train, data.test, data.about
    assert isinstance(train, Arrays)
    require_images(train.x, "images is given", job.path)
    if augmentation.normalise:
        mean, deviation = images.scale_of(train.x)
        train, test = (images.Scaled(source, mean, deviation) for source in (train, test))
        about = {"normalised": {"mean": mean.tolist(), "deviation": deviation.tolist()}}
    return Data(images.augment(train, augmentation), test, about=about), train
