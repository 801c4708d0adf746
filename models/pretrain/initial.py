"""Training that starts from the params of an earlier one: a job's `init`.

    "init": {"params": "model.safetensors", "head": "new"}

With the default head, `same`, every tensor must fit. With `new`, the model's last module keeps its fresh weights, for
other classes or another task (Devlin 2019, section 3.2).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import nn

from edge_client.files import read_regular
from models import options
from models.job import Job, JobError
from models.pretrain.params import Params, copy_into, float_tensors
from models.zoo.spec import ModelSpec

HEADS = ("same", "new")
LIMIT_BYTES = 64 * 1024**3
"""Largest file of params accepted."""
_LISTED = 8


def with_init(job: Job, spec: ModelSpec) -> ModelSpec:
    """`spec`, whose new modules start from the params that the job's `init` names, if any.

    Raises:
        JobError: the file cannot be read, or its tensors do not fit; lists those that do not.
    """
    if "init" not in job.settings:
        return spec
    where = f"{job.path}: init"
    try:
        table = options.only(job.settings["init"], ("params", "head"), where)
    except options.OptionError as error:
        raise JobError(str(error)) from None
    head = table.get("head", "same")
    if head not in HEADS:
        raise JobError(f"{where}.head is {head!r}, expected one of {', '.join(HEADS)}")
    return with_params(spec, job.file("init.params", job.value("init", "params")), new_head=head == "new")


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
    problems = mismatches(tensors, spec, new_head=new_head)
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        advice = "" if new_head else '; `head = "new"` leaves the last module out'
        raise JobError(
            f"{path} does not fit model {spec.name!r}: {'; '.join(problems[:_LISTED])}{more}{advice}"
        )

    def module() -> nn.Module:
        built = spec.module()
        head = _head(built, spec) if new_head else ""
        copy_into(built, {name: tensor for name, tensor in tensors.items() if not _within(name, head)})
        return built

    return dataclasses.replace(spec, module=module)


def mismatches(tensors: Params, spec: ModelSpec, *, new_head: bool) -> list[str]:
    """One phrase for every tensor of `tensors` or of the model without a counterpart of the same shape."""
    with torch.device("meta"):
        built = spec.module()
    head = _head(built, spec) if new_head else ""
    expected = float_tensors(built)
    problems = []
    for name in sorted(set(tensors) | set(expected)):
        if _within(name, head):
            continue
        if name not in tensors:
            problems.append(f"{name} is missing")
        elif name not in expected:
            problems.append(f"{name} is not one of the model's")
        elif tensors[name].shape != tuple(expected[name].shape):
            problems.append(f"{name} is {tensors[name].shape}, the model has {tuple(expected[name].shape)}")
    return problems


def _head(module: nn.Module, spec: ModelSpec) -> str:
    """Path of the last module: of the layout's order, or of the direct children."""
    if spec.layout is not None and spec.layout.order:
        return spec.layout.order[-1]
    return [name for name, _ in module.named_children()][-1]


def _within(name: str, head: str) -> bool:
    return bool(head) and name.startswith(f"{head}.")
