"""Training that starts from the params of an earlier one: a job's `init`.

    "init": {"params": "model.safetensors", "head": "new"}

With the default head, `same`, every tensor must fit. With `new`, the model's last module keeps its fresh weights, for
other classes or another task (Devlin 2019, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import nn

from edge_client.files import read_regular
from models.job import JobError, JobFile
from models.pretrain.params import copy_into, float_tensors, mismatches
from models.zoo.spec import ModelSpec

LIMIT_BYTES = 64 * 1024**3
"""Largest file of params accepted."""
_LISTED = 8


@dataclass(frozen=True)
class Initial:
    """A job's `init`: a file of `params`, relative to the job file, and which `head` the model begins with."""

    params: str
    head: Literal["same", "new"] = "same"


def with_init(job: JobFile, spec: ModelSpec) -> ModelSpec:
    """`spec`, whose new modules start from the params that the job's `init` names, if any.

    Raises:
        JobError: the file cannot be read, or its tensors do not fit; lists those that do not.
    """
    init = job.table("init", Initial)
    if init is None:
        return spec
    return with_params(spec, job.file("init.params", init.params), new_head=init.head == "new")


def with_params(spec: ModelSpec, path: Path, *, new_head: bool) -> ModelSpec:
    """`spec`, whose new modules start from the params in `path`, except the head with `new_head`.

    Raises:
        JobError: the file cannot be read, or its tensors do not fit; lists those that do not.
    """
    try:
        tensors = safetensors.numpy.load(read_regular(path, LIMIT_BYTES))
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from error
    except SafetensorError as error:
        raise JobError(f"{path} is not a readable .safetensors file: {error}") from error
    with torch.device("meta"):
        built = spec.module()
    head = _head(built, spec) if new_head else ""
    tensors = {name: tensor for name, tensor in tensors.items() if not _within(name, head)}
    expected = {name: tensor for name, tensor in float_tensors(built).items() if not _within(name, head)}
    if problems := mismatches(tensors, expected):
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        advice = "" if new_head else '; `head = "new"` leaves the last module out'
        raise JobError(
            f"{path} does not fit model {spec.name!r}: {'; '.join(problems[:_LISTED])}{more}{advice}"
        )

    def module() -> nn.Module:
        built = spec.module()
        copy_into(built, tensors)
        return built

    return replace(spec, module=module)


def _head(module: nn.Module, spec: ModelSpec) -> str:
    """Path of the last module: of the layout's order, or of the direct children."""
    if spec.layout is not None and spec.layout.order:
        return spec.layout.order[-1]
    return [name for name, _ in module.named_children()][-1]


def _within(name: str, head: str) -> bool:
    return bool(head) and name.startswith(f"{head}.")
